"""The tensors of a checkpoint that prompts are built from: text embedding and projection, code embeddings."""

from __future__ import annotations

from typing import Any

import torch

from engine.checkpoint import Checkpoint
from engine.geometry import talker_shapes


def load_weights(checkpoint: Checkpoint) -> dict[str, Any]:
    """text_embedding [text vocabulary, text width], codec_embedding [vocabulary, H], fc1 and fc2 of the projection in
    float32, and the list group_embeddings of G - 1 tables [codebook, H]; random for a dummy checkpoint."""
    t = checkpoint.talker
    names = {
        "text_embedding": "talker.model.text_embedding.weight",
        "codec_embedding": "talker.model.codec_embedding.weight",
        "fc1_weight": "talker.text_projection.linear_fc1.weight",
        "fc1_bias": "talker.text_projection.linear_fc1.bias",
        "fc2_weight": "talker.text_projection.linear_fc2.weight",
        "fc2_bias": "talker.text_projection.linear_fc2.bias",
    }
    group_names = [f"talker.code_predictor.model.codec_embedding.{g}.weight" for g in range(checkpoint.groups - 1)]
    wanted = {*names.values(), *group_names}
    if checkpoint.load_format == "dummy":
        shapes = talker_shapes(checkpoint.config)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            # bf16 as in the published files: the text table alone has 311 million values
            n: torch.empty(shapes[n], dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for n in sorted(wanted)
        }
    else:
        tensors = {}
        for prefix in ("talker.model.text_embedding", "talker.model.codec_embedding", "talker.text_projection",
                       "talker.code_predictor.model.codec_embedding"):  # fmt: skip
            tensors |= dict(checkpoint.tensors(prefix))
    weights: dict[str, Any] = {key: tensors[name] for key, name in names.items()}
    for key in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"):
        weights[key] = weights[key].float()
    weights["group_embeddings"] = [tensors[name] for name in group_names]
    assert weights["codec_embedding"].shape[1] == t["hidden_size"]
    return weights
