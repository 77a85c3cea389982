"""CTranslate2's Whisper file -> an openai-whisper checkpoint.

CTranslate2 (model specification v6) keeps Linear and Conv1d weights in PyTorch's layout but fuses the projections
of an attention: query, key and value of self-attention are the three thirds of one matrix, key and value of
cross-attention the halves of another. openai-whisper wants them apart, and its key projection has no bias.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_OLDEST_TYPED_VERSION = 4  # files before it carry an item size instead of a type


class NotWhisper(ValueError):
    """The file is not a CTranslate2 Whisper model this converter knows."""


def convert_file(source: Path, target: Path) -> None:
    """Read `source` (a CTranslate2 model.bin) and write `target`, which `whisper.load_model` reads.

    Raises:
        NotWhisper: another model, or a layout this converter does not know.
    """
    torch.save(to_checkpoint(read_variables(source)), target)


def read_variables(path: Path) -> dict[str, torch.Tensor]:
    """All named arrays of a CTranslate2 model.bin, in their stored type.

    Layout (little-endian): u32 version, string spec, u32 revision, u32 count, then per variable: string name, u8 rank,
    u32 dims, u8 type, u32 byte count, bytes; then u32 alias count and pairs of strings. A string is a u16 length
    (with the closing NUL) and its bytes.
    """
    data = memoryview(path.read_bytes())
    at = 0

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def string() -> str:
        nonlocal at
        length = number("H")
        raw = bytes(data[at : at + length])
        at += length
        return raw.rstrip(b"\0").decode()

    try:
        if number("I") < _OLDEST_TYPED_VERSION:
            raise NotWhisper(f"{path.name}: file version too old")
        if (spec := string()) != "WhisperSpec":
            raise NotWhisper(f"{path.name}: a '{spec}', not a Whisper model")
        number("I")  # revision
        variables = {}
        for _ in range(number("I")):
            name = string()
            shape = [number("I") for _ in range(number("B"))]
            kind, size = number("B"), number("I")
            array = np.frombuffer(data[at : at + size], dtype=_DTYPES[kind]).reshape(shape)
            variables[name] = torch.from_numpy(array.copy())
            at += size
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise NotWhisper(f"{path.name}: not a CTranslate2 model file ({error})") from error
    return variables


def to_checkpoint(variables: dict[str, torch.Tensor]) -> dict:
    """`{"dims": ..., "model_state_dict": ...}` as openai-whisper saves it."""
    layers = {side: _count_layers(variables, side) for side in ("encoder", "decoder")}
    positions = {side: variables[f"{side}/position_encodings/encodings"] for side in layers}
    conv1 = variables["encoder/conv1/weight"]  # [state, mels, 3]
    tokens = variables["decoder/embeddings/weight"]  # [vocab, state]
    dims = {
        "n_mels": conv1.shape[1],
        "n_audio_ctx": positions["encoder"].shape[0],
        "n_audio_state": conv1.shape[0],
        "n_audio_head": int(variables["encoder/num_heads"]),
        "n_audio_layer": layers["encoder"],
        "n_vocab": tokens.shape[0],
        "n_text_ctx": positions["decoder"].shape[0],
        "n_text_state": tokens.shape[1],
        "n_text_head": int(variables["decoder/num_heads"]),
        "n_text_layer": layers["decoder"],
    }
    state = {
        "encoder.positional_embedding": positions["encoder"],
        "decoder.positional_embedding": positions["decoder"],
        "decoder.token_embedding.weight": tokens,  # the output projection is tied to it
    }
    state |= _dense(variables, "encoder/conv1", "encoder.conv1") | _dense(variables, "encoder/conv2", "encoder.conv2")
    state |= _norm(variables, "encoder/layer_norm", "encoder.ln_post")
    state |= _norm(variables, "decoder/layer_norm", "decoder.ln")
    for side, count in layers.items():
        for i in range(count):
            for part in _block(variables, f"{side}/layer_{i}", f"{side}.blocks.{i}", cross=side == "decoder"):
                state |= part
    return {"dims": dims, "model_state_dict": state}


def _count_layers(variables: dict[str, torch.Tensor], side: str) -> int:
    found = {int(m[1]) for name in variables if (m := re.match(rf"{side}/layer_(\d+)/", name))}
    if not found:
        raise NotWhisper(f"no {side} layers")
    return max(found) + 1


def _block(v: dict[str, torch.Tensor], src: str, dst: str, *, cross: bool) -> Iterator[dict[str, torch.Tensor]]:
    attention = f"{src}/self_attention"
    yield _norm(v, f"{attention}/layer_norm", f"{dst}.attn_ln")
    yield _projections(v, f"{attention}/linear_0", f"{dst}.attn", ("query", "key", "value"))
    yield _dense(v, f"{attention}/linear_1", f"{dst}.attn.out")
    if cross:
        attention = f"{src}/attention"
        yield _norm(v, f"{attention}/layer_norm", f"{dst}.cross_attn_ln")
        yield _dense(v, f"{attention}/linear_0", f"{dst}.cross_attn.query")
        yield _projections(v, f"{attention}/linear_1", f"{dst}.cross_attn", ("key", "value"))
        yield _dense(v, f"{attention}/linear_2", f"{dst}.cross_attn.out")
    yield _norm(v, f"{src}/ffn/layer_norm", f"{dst}.mlp_ln")
    yield _dense(v, f"{src}/ffn/linear_0", f"{dst}.mlp.0")
    yield _dense(v, f"{src}/ffn/linear_1", f"{dst}.mlp.2")


def _projections(v: dict[str, torch.Tensor], src: str, dst: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Cut a fused matrix [n * d, d] and its bias [n * d] into `names`."""
    out = {}
    weights = v[f"{src}/weight"].chunk(len(names))
    biases = v[f"{src}/bias"].chunk(len(names))
    for name, weight, bias in zip(names, weights, biases, strict=True):
        out[f"{dst}.{name}.weight"] = weight.clone()
        if name != "key":
            out[f"{dst}.{name}.bias"] = bias.clone()
        elif bias.abs().max() != 0:
            raise NotWhisper(f"{src}: a key bias that is not zero has no place in Whisper")
    return out


def _dense(v: dict[str, torch.Tensor], src: str, dst: str) -> dict[str, torch.Tensor]:
    return {f"{dst}.weight": v[f"{src}/weight"], f"{dst}.bias": v[f"{src}/bias"]}


def _norm(v: dict[str, torch.Tensor], src: str, dst: str) -> dict[str, torch.Tensor]:
    return {f"{dst}.weight": v[f"{src}/gamma"], f"{dst}.bias": v[f"{src}/beta"]}
