"""What a request may ask of a checkpoint (language, speaker, voice, instruction), checked before it costs anything."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.checkpoint import Checkpoint
from engine.errors import InvalidRequest

# Codes people type for the languages of the published checkpoints.
ISO = {
    "zh": "chinese",
    "en": "english",
    "de": "german",
    "it": "italian",
    "pt": "portuguese",
    "es": "spanish",
    "ja": "japanese",
    "ko": "korean",
    "fr": "french",
    "ru": "russian",
}


class PromptChecks:
    """Of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config: dict[str, Any] = checkpoint.config
        self.talker: dict[str, Any] = checkpoint.talker

    def resolve_language(self, language: str | None, speaker: str | None = None) -> int | None:
        """The codec id of a language, None for "auto". Takes names and ISO 639-1 codes, in any case.

        A dialect speaker spoken "auto" or in Chinese uses the dialect's id, as in the reference.

        Raises:
            InvalidRequest: a language the checkpoint does not have.
        """
        name = (language or "auto").strip().lower()
        ids: dict[str, int] = self.talker.get("codec_language_id") or {}
        name = name if name in ids or name == "auto" else ISO.get(name.split("-")[0], name)
        if name != "auto" and name not in ids:
            raise InvalidRequest(
                f"language {language!r} is not one of this checkpoint's: auto, {', '.join(self.checkpoint.languages)}",
                field="language",
            )
        dialect = (self.talker.get("spk_is_dialect") or {}).get(speaker) if speaker else None
        if dialect and name in ("auto", "chinese"):
            return ids[dialect]
        return None if name == "auto" else ids[name]

    def resolve_speaker(self, speaker: str | None) -> str:
        """A preset speaker's name in lower case.

        Raises:
            InvalidRequest: none given, or not one of the checkpoint's.
        """
        known = self.talker.get("spk_id") or {}
        name = (speaker or "").strip().lower()
        if name not in known:
            wrong = f"speaker {speaker!r} is not one" if name else "this checkpoint needs a speaker: one"
            raise InvalidRequest(f"{wrong} of {', '.join(sorted(known))}", field="speaker")
        return name

    @property
    def takes_instruct(self) -> bool:
        """Everything but Base; the 0.6B CustomVoice checkpoint ignores instructions in the reference."""
        return self.checkpoint.task != "Base" and str(self.config.get("tts_model_size")) not in ("0b6", "0.6b")

    def check_parts(
        self,
        speaker: str | None,
        instruct: str | None,
        embedding: np.ndarray | None,
        codes: np.ndarray | None,
        reference_text: str | None,
    ) -> str | None:
        """What a request brings against what the checkpoint's task takes; the preset speaker's name, if any.

        Raises:
            InvalidRequest: a part that the task does not take, or lacks; `field` names it.
        """
        task = self.checkpoint.task
        if task == "Base":
            if speaker or instruct:
                raise InvalidRequest(
                    f"{'speaker' if speaker else 'instruct'} is not for a Base checkpoint: it clones the voice of a "
                    "reference clip",
                    field="speaker" if speaker else "instruct",
                )
            if embedding is None:
                raise InvalidRequest("a Base checkpoint needs a reference voice", field="voice")
            if codes is not None and not (reference_text or "").strip():
                raise InvalidRequest(
                    "cloning with reference codes needs the transcript of the clip; give it, or ask for x-vector only",
                    field="ref_text",
                )
            return None
        if embedding is not None or codes is not None:
            raise InvalidRequest(f"a {task} checkpoint cannot clone a reference voice", field="voice")
        if task == "CustomVoice":
            return self.resolve_speaker(speaker)
        if speaker:
            raise InvalidRequest("a VoiceDesign checkpoint has no preset speakers; describe the voice", field="speaker")
        return None
