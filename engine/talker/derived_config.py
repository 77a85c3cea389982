"""What vLLM is told about the model: a small Qwen3 config in a temporary folder, the real one nested inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.talker.geometry import TalkerGeometry
from engine.talker.settings import TalkerSettings

# vLLM 0.26 warms its sampler up with the top 50 of the vocabulary and biases on ids 0 and 1.
SMALLEST_VOCABULARY = 128


def vocabulary(slots: int) -> int:
    """vLLM's vocabulary: slots 0 (trash) .. slots, then the end token; padded to a multiple of 64."""
    return max(SMALLEST_VOCABULARY, (slots + 2 + 63) // 64 * 64)


def write(folder: Path, config: dict[str, Any], geometry: TalkerGeometry, settings: TalkerSettings, name: str) -> None:
    """Write config.json into `folder`.

    Plain rotary positions: the three rows of the checkpoint's mrope are always equal for speech, and with
    `mrope_section` in sight vLLM would make positions of three rows.
    """
    g = geometry.talker
    derived = {
        "model_type": "qwen3",
        "architectures": [name],
        "vocab_size": vocabulary(settings.slot_count),
        "hidden_size": g.hidden,
        "intermediate_size": g.intermediate,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "rms_norm_eps": g.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": g.rope_theta},
        "max_position_embeddings": settings.max_model_len,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": settings.dtype,
        "bos_token_id": None,
        "eos_token_id": settings.slot_count + 1,
        "chorus": {
            "config": {"talker_config": config["talker_config"]},
            "slots": settings.slot_count,
            "max_prompt": settings.max_prompt,
            "max_frames": settings.max_frames,
            "predictor": settings.predictor_path,
            "predictor_weights": settings.predictor_weights,
            "layers": settings.layers_path,
            "speak_after": settings.placement in ("own_graph", "eager"),
            "probe": settings.device == "cuda" and settings.cudagraph != "none" and settings.self_check,
        },
    }
    (folder / "config.json").write_text(json.dumps(derived), encoding="utf-8")
