"""The sizes of a talker and its code predictor, read once from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError

CONTROL_IDS = 1024  # the last 1024 ids of the talker's vocabulary are control ids, never spoken (reference generate())


@dataclass(frozen=True)
class StackGeometry:
    """One stack of Qwen3-style decoder layers: pre-norm, grouped-query attention with q/k norm, SwiGLU."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> StackGeometry:
        """Read `hidden_size` and its companions.

        `rope_theta` may stand alone or inside `rope_parameters`, where transformers 5 moves it when it saves.

        Raises:
            CheckpointError: a size is missing or heads do not divide evenly; `field` names it.
        """
        rope = config.get("rope_parameters") or {}
        heads = _int(config, "num_attention_heads", where)
        hidden = _int(config, "hidden_size", where)
        kv_heads = _int(config, "num_key_value_heads", where)
        head_dim = config.get("head_dim") or hidden // heads
        if heads % kv_heads:
            raise CheckpointError(
                f"{where}: {heads} attention heads do not divide into {kv_heads} key/value heads; correct config.json",
                field=f"{where}.num_key_value_heads",
            )
        return cls(
            hidden=hidden,
            intermediate=_int(config, "intermediate_size", where),
            layers=_int(config, "num_hidden_layers", where),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=int(head_dim),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 1e6),
        )


@dataclass(frozen=True)
class TalkerGeometry:
    """Everything the talker's code asks about sizes.

    `vocab` counts the talker's ids (codes of group 0 and control ids), `predictor_vocab` the codes of groups 1 and up.
    """

    talker: StackGeometry
    predictor: StackGeometry
    vocab: int
    predictor_vocab: int
    groups: int
    eos: int

    @property
    def has_projection(self) -> bool:
        """Whether the predictor reads the talker's rows through `small_to_mtp_projection` (widths differ)."""
        return self.talker.hidden != self.predictor.hidden

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TalkerGeometry:
        """Read the `talker_config` of a Qwen3-TTS config.json (given whole)."""
        talker = config.get("talker_config")
        if not isinstance(talker, Mapping):
            raise CheckpointError(
                "config.json has no talker_config: this is not a Qwen3-TTS checkpoint", field="talker_config"
            )
        predictor = talker.get("code_predictor_config")
        if not isinstance(predictor, Mapping):
            raise CheckpointError(
                "talker_config has no code_predictor_config: this is not a Qwen3-TTS 12 Hz checkpoint",
                field="talker_config.code_predictor_config",
            )
        where = "talker_config"
        geometry = cls(
            talker=StackGeometry.from_config(talker, where),
            predictor=StackGeometry.from_config(predictor, f"{where}.code_predictor_config"),
            vocab=_int(talker, "vocab_size", where),
            predictor_vocab=_int(predictor, "vocab_size", f"{where}.code_predictor_config"),
            groups=_int(talker, "num_code_groups", where),
            eos=_int(talker, "codec_eos_token_id", where),
        )
        if geometry.groups < 2:
            raise CheckpointError("a talker needs at least 2 code groups", field=f"{where}.num_code_groups")
        if not 0 <= geometry.eos < geometry.vocab:
            raise CheckpointError(
                f"codec_eos_token_id {geometry.eos} lies outside the vocabulary of {geometry.vocab}",
                field=f"{where}.codec_eos_token_id",
            )
        return geometry


def _int(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}.{key} must be a positive integer, not {value!r}", field=f"{where}.{key}")
    return value
