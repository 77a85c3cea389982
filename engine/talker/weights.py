"""Weights into the talker model: from a checkpoint's tensors, or random ones of its geometry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from engine.errors import CheckpointError
from engine.talker.layers import decoder_layers

if TYPE_CHECKING:
    from engine.talker.model import TalkerModel

TALKER = "talker.model."
PREDICTOR = "talker.code_predictor."

# The checkpoint's name inside a layer, our parameter, and which part of it (start as a name of the geometry).
LAYER_PARTS = {
    "self_attn.q_proj": ("qkv", "query"),
    "self_attn.k_proj": ("qkv", "key"),
    "self_attn.v_proj": ("qkv", "value"),
    "self_attn.o_proj": ("output", None),
    "self_attn.q_norm": ("query_norm", None),
    "self_attn.k_norm": ("key_norm", None),
    "mlp.gate_proj": ("gate_up", "gate"),
    "mlp.up_proj": ("gate_up", "up"),
    "mlp.down_proj": ("down", None),
    "input_layernorm": ("input_norm", None),
    "post_attention_layernorm": ("post_norm", None),
}


def _targets(model: TalkerModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every checkpoint name the model reads, with the view of the parameter it fills."""
    predictor = model.predictor
    yield TALKER + "norm.weight", model.norm
    yield TALKER + "codec_embedding.weight", predictor.first_embedding
    yield "talker.codec_head.weight", model.head
    yield PREDICTOR + "model.norm.weight", predictor.norm
    for group in range(model.geometry.groups - 1):
        yield f"{PREDICTOR}model.codec_embedding.{group}.weight", predictor.embeddings[group]
        yield f"{PREDICTOR}lm_head.{group}.weight", predictor.heads[group]
    if model.geometry.has_projection:
        yield PREDICTOR + "small_to_mtp_projection.weight", predictor.projection
        yield PREDICTOR + "small_to_mtp_projection.bias", predictor.projection_bias
    for prefix, layers in ((TALKER, model.layers), (PREDICTOR + "model.", predictor.layers)):
        for index, layer in enumerate(decoder_layers(layers)):
            g = layer.geometry
            query, key, inner = g.heads * g.head_dim, g.kv_heads * g.head_dim, g.intermediate
            spans = {
                "query": (0, query),
                "key": (query, key),
                "value": (query + key, key),
                "gate": (0, inner),
                "up": (inner, inner),
            }
            for name, (parameter, part) in LAYER_PARTS.items():
                target = getattr(layer, parameter)
                yield f"{prefix}layers.{index}.{name}.weight", target.narrow(0, *spans[part]) if part else target


@torch.no_grad()
def load(model: TalkerModel, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a checkpoint's `talker.*` tensors into the model; others (text embedding ...) are passed over.

    Raises:
        CheckpointError: a tensor is missing or has another shape than config.json asks for.
    """
    targets = dict(_targets(model))
    for name, tensor in tensors:
        target = targets.pop(name, None)
        if target is None:
            continue
        if target.shape != tensor.shape:
            raise CheckpointError(
                f"tensor {name} is {list(tensor.shape)}, config.json asks for {list(target.shape)}; "
                "config and weights do not belong together",
                field=name,
            )
        target.copy_(tensor)
    if targets:
        missing = ", ".join(sorted(targets)[:3])
        raise CheckpointError(f"{len(targets)} talker tensors are missing, {missing} among them", field="model")


@torch.no_grad()
def fill_random(model: TalkerModel, seed: int = 0) -> None:
    """Random weights in place: normal with deviation 0.02, norms 1, biases 0; values of bfloat16, as published
    checkpoints are. For measuring speed, not for sound."""
    generator = torch.Generator(device=model.head.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
            parameter.copy_(parameter.bfloat16())
