"""A request's text, voice and style as the rows the talker is prefilled with.

The layouts are those of the reference implementation (PyPI qwen-tts 0.1.1, `generate` and `generate_icl_prompt`),
checked row by row in tests/test_prompt.py. "txt(x)" is text embedding then text projection; a codec embedding is
added at the same position.

    instruct   txt(user turn)                                            optional, first
    role       txt(im_start, "assistant", newline)
    control    tts_pad…, tts_bos  +  [nothink | think … language], speaker, codec_pad
    tail       streaming text:     txt(first id) + codec_bos
               non-streaming text: txt(ids), tts_eos + codec_pad; tts_pad + codec_bos
               ICL:                (ref text, text, tts_eos) against (codec_bos, one summed row per ref frame)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.checkpoint import Checkpoint
from engine.errors import InvalidRequest
from engine.talker.slots import PromptRows
from engine.text_rows import TextRows
from engine.tokenizer import load_tokenizer

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


class PromptBuilder:
    """Builds prompts on the CPU in float32, away from the thread that drives the model. Safe to call from many threads.

    Holds the text embedding, the text projection and the code embeddings of the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.talker = checkpoint.talker
        self.tokenizer = load_tokenizer(checkpoint)
        self.hidden = int(self.talker["hidden_size"])
        weights = _load_weights(checkpoint)
        fc = [weights[name] for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]
        self.text_rows = TextRows(weights["text_embedding"], fc)
        self._codec_table = weights["codec_embedding"]  # [vocab, H]
        self._group_tables = weights["group_embeddings"]  # G-1 tables [codebook, H]
        bos, eos, pad = self.text_rows([self.config[f"tts_{n}_token_id"] for n in ("bos", "eos", "pad")]).split(1)
        self.tts_bos, self.tts_eos, self.tts_pad = bos, eos, pad  # [1, H] each
        self._icl_rows = lru_cache(maxsize=64)(self._sum_codes)

    # ---- checks, before anything is spent ----------------------------------------------------------------------

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

    def count_tokens(self, text: str, instruct: str | None = None) -> int:
        """Tokens of a text, and of an instruction where it is read; the frame around them is not counted."""
        return len(self._ids(text)) + (len(self._ids(instruct)) if instruct and self.takes_instruct else 0)

    # ---- building ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def build(
        self,
        text: str,
        *,
        language: str | None = "auto",
        speaker: str | None = None,
        instruct: str | None = None,
        speaker_embedding: np.ndarray | None = None,
        reference_codes: np.ndarray | None = None,
        reference_text: str | None = None,
        non_streaming_text: bool | None = None,
    ) -> PromptRows:
        """Prefill rows, trailing text rows and the pad row of one utterance.

        Args:
            text: cleaned text.
            language: name, ISO code or "auto".
            speaker: preset speaker (CustomVoice only).
            instruct: style or voice description (CustomVoice, VoiceDesign).
            speaker_embedding: float32 [H] of the reference voice (Base only).
            reference_codes: int64 [frames, G]; with `reference_text` selects in-context (ICL) cloning.
            reference_text: what the reference clip says.
            non_streaming_text: the whole text ahead of the speech; None takes the reference's default of the task.

        Raises:
            InvalidRequest: a part that the checkpoint's task does not take, or lacks.
        """
        name = self._check_parts(speaker, instruct, speaker_embedding, reference_codes, reference_text)
        language_id = self.resolve_language(language, name)
        if non_streaming_text is None:
            non_streaming_text = self.checkpoint.task != "Base"
        voice = self._voice_row(name, speaker_embedding)
        ids = self._ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        role, spoken = ids[:3], ids[3:-5]
        head = [self.text_rows(role), self._control(language_id, voice)]
        if instruct and self.takes_instruct:
            head.insert(0, self.text_rows(self._ids(f"<|im_start|>user\n{instruct}<|im_end|>\n")))
        if reference_codes is not None:
            reference = self._ids(f"<|im_start|>assistant\n{reference_text}<|im_end|>\n")[3:-2]
            codes = np.ascontiguousarray(reference_codes, dtype=np.int64)
            tail, trailing = self._icl(reference + spoken, codes, non_streaming_text)
        else:
            tail, trailing = self._plain(spoken, non_streaming_text)
        return PromptRows(prefill=torch.cat([*head, tail]), trailing=trailing, pad=self.tts_pad[0])

    def _check_parts(self, speaker, instruct, embedding, codes, reference_text) -> str | None:
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

    def _voice_row(self, speaker: str | None, embedding: np.ndarray | None) -> torch.Tensor | None:
        if speaker is not None:
            return self._code(0, [self.talker["spk_id"][speaker]])
        if embedding is None:
            return None
        row = torch.from_numpy(np.asarray(embedding, dtype=np.float32)).reshape(1, -1)
        if row.shape[1] != self.hidden:
            raise InvalidRequest(
                f"the speaker embedding has {row.shape[1]} values, this checkpoint's have {self.hidden}; prepare the "
                "voice again with this checkpoint",
                field="voice",
            )
        return row

    def _control(self, language_id: int | None, voice: torch.Tensor | None) -> torch.Tensor:
        t = self.talker
        if language_id is None:
            tags = [t["codec_nothink_id"], t["codec_think_bos_id"], t["codec_think_eos_id"]]
        else:
            tags = [t["codec_think_id"], t["codec_think_bos_id"], language_id, t["codec_think_eos_id"]]
        parts = [self._code(0, tags), self._code(0, [t["codec_pad_id"]])]
        if voice is not None:
            parts.insert(1, voice)
        codec = torch.cat(parts)
        text = torch.cat([self.tts_pad.expand(codec.shape[0] - 1, -1), self.tts_bos])
        return text + codec

    def _plain(self, spoken: list[int], non_streaming: bool) -> tuple[torch.Tensor, torch.Tensor]:
        bos = self._code(0, [self.talker["codec_bos_id"]])
        text = torch.cat([self.text_rows(spoken), self.tts_eos])
        if non_streaming:
            pad = self._code(0, [self.talker["codec_pad_id"]])
            return torch.cat([text + pad, self.tts_pad + bos]), self.tts_pad
        return text[:1] + bos, text[1:]

    def _icl(self, ids: list[int], codes: np.ndarray, non_streaming: bool) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.cat([self.text_rows(ids), self.tts_eos])
        frames = self._icl_rows(codes.tobytes(), codes.shape)
        codec = torch.cat([self._code(0, [self.talker["codec_bos_id"]]), frames])
        if non_streaming:
            pad = self._code(0, [self.talker["codec_pad_id"]])
            return torch.cat([text + pad, codec + self.tts_pad]), self.tts_pad
        overlap = codec.shape[0]
        if text.shape[0] > overlap:
            return text[:overlap] + codec, text[overlap:]
        fill = self.tts_pad.expand(overlap - text.shape[0], -1)
        return torch.cat([text, fill]) + codec, self.tts_pad

    # ---- pieces ------------------------------------------------------------------------------------------------

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text)

    def _code(self, group: int, ids: list[int]) -> torch.Tensor:
        table = self._codec_table if group == 0 else self._group_tables[group - 1]
        return F.embedding(torch.tensor(ids, dtype=torch.int64), table).float()

    @torch.inference_mode()
    def _sum_codes(self, data: bytes, shape: tuple[int, int]) -> torch.Tensor:
        """One row per reference frame: the sum of its G code embeddings, float32 [frames, H]. Cached by content."""
        codes = np.frombuffer(data, dtype=np.int64).reshape(shape)
        if shape[1] != self.checkpoint.groups:
            raise InvalidRequest(
                f"the reference has {shape[1]} codes a frame, this checkpoint uses {self.checkpoint.groups}",
                field="voice",
            )
        limit = self.talker["code_predictor_config"]["vocab_size"]
        if codes.min() < 0 or codes.max() >= limit:
            raise InvalidRequest(
                f"the reference codes reach {codes.max()}, this checkpoint's end at {limit - 1}; prepare the "
                "voice again with this checkpoint",
                field="voice",
            )
        rows = [self._code(group, codes[:, group].tolist()) for group in range(shape[1])]
        return torch.stack(rows).sum(0)


def _load_weights(checkpoint: Checkpoint) -> dict[str, Any]:
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
        from engine.geometry import talker_shapes

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
