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

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from engine.checkpoint import Checkpoint
from engine.errors import InvalidRequest
from engine.prompt_checks import PromptChecks
from engine.prompt_weights import load_weights
from engine.talker.slots import PromptRows
from engine.text_rows import TextRows
from engine.tokenizer import load_tokenizer

KEPT = 64  # voices (with language and layout) whose rows are kept: 2 to 4 MB each for a clip of 12 s
FRAME = 8  # ids around those of a text
GRAIN = 16384  # numbers that torch handles in the calling thread (its at::internal::GRAIN_SIZE is 32768)


@dataclass(frozen=True)
class _Surroundings:
    """What stands around the rows of a text, the same for every text of a voice, language and layout.

    Attributes:
        before: rows ahead of the text's.
        codec: float32 [n, H] what is added to the text's rows, one by one; non-streaming: the last to all further ones.
        after: rows that follow; streaming: those from number i on when the text has i rows. The last is the pad row.
        speech_starts: streaming: rows of the prompt, of whatever text.
        room: streaming: text rows beside the reference; a longer text trails.
        finite: whether all values are.
    """

    before: torch.Tensor
    codec: np.ndarray
    after: torch.Tensor
    speech_starts: int
    room: int
    finite: bool

    def fills(self, rows: int) -> bool:
        """Streaming: whether a text of so many rows ends beside the reference, so that pad rows fill it up."""
        return rows <= self.room


class PromptBuilder(PromptChecks):
    """Builds prompts on the CPU in float32, away from the thread that drives the model. Safe to call from many threads.

    Holds the text embedding, the text projection and the code embeddings of the checkpoint. What does not depend on
    the text is kept per voice and layout, in the form in which it is copied to the talker; a request costs its own
    text's rows. Those are summed by numpy: torch would wake a team of threads for each caller, and 32 callers with a
    team each starve the thread that drives the model (38 ms a prompt instead of 1, measured).
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, *, pinned: bool = False) -> None:
        """Rows come out in `dtype`; `pinned`: in memory from which a GPU copies without a wait."""
        super().__init__(checkpoint)
        self.tokenizer = load_tokenizer(checkpoint)
        self.hidden = int(self.talker["hidden_size"])
        weights = load_weights(checkpoint)
        fc = [weights[name] for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]
        self.text_rows = TextRows(weights["text_embedding"], fc)
        self._codec_table = weights["codec_embedding"]  # [vocab, H]
        self._group_tables = weights["group_embeddings"]  # G-1 tables [codebook, H]
        bos, eos, pad = self.text_rows([self.config[f"tts_{n}_token_id"] for n in ("bos", "eos", "pad")]).split(1)
        self.tts_bos, self.tts_eos, self.tts_pad = bos, eos, pad  # [1, H] each
        self._dtype, self._pinned = dtype, pinned
        self._pad_row = self._final(pad)
        self._surroundings = lru_cache(maxsize=KEPT)(self._surround)
        self._framed = lru_cache(maxsize=KEPT)(self._framed_ids)

    # ---- building ----------------------------------------------------------------------------------------------

    def count_tokens(self, text: str, instruct: str | None = None) -> int:
        """Tokens of a text, and of an instruction where it is read; the frame around them is not counted."""
        return len(self._framed(text)) - FRAME + (len(self._ids(instruct)) if instruct and self.takes_instruct else 0)

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
        name = self.check_parts(speaker, instruct, speaker_embedding, reference_codes, reference_text)
        language_id = self.resolve_language(language, name)
        if non_streaming_text is None:
            non_streaming_text = self.checkpoint.task != "Base"
        embedding = None if speaker_embedding is None else np.asarray(speaker_embedding, dtype=np.float32)
        codes = None if reference_codes is None else np.ascontiguousarray(reference_codes, dtype=np.int64)
        ids = self._framed(text)
        around = self._surroundings(
            ids[:3],
            language_id,
            name,
            None if embedding is None else embedding.tobytes(),
            None if codes is None else (codes.tobytes(), codes.shape),
            reference_text if codes is not None else None,
            non_streaming_text,
        )
        mine = self.text_rows([*ids[3:-5], self.config["tts_eos_token_id"]]).numpy()
        beside = min(len(mine), len(around.codec))
        mine[:beside] += around.codec[:beside]
        if non_streaming_text:
            mine[beside:] += around.codec[-1]
            length, after = around.before.shape[0] + len(mine) + around.after.shape[0] - 2, around.after
        else:
            length = around.speech_starts
            after = around.after[beside:] if around.fills(len(mine)) else around.after[-1:]
        parts = [around.before, self._final(torch.from_numpy(mine)), after]
        if instruct and self.takes_instruct:
            style = self._final(self.text_rows(self._ids(f"<|im_start|>user\n{instruct}<|im_end|>\n")))
            parts.insert(0, style)
            length += style.shape[0]
        finite = around.finite and bool(np.isfinite(mine).all())
        return PromptRows.joined(parts, length, self._pad_row[0], finite=finite)

    def _voice_row(self, speaker: str | None, embedding: np.ndarray | None) -> torch.Tensor | None:
        if speaker is not None:
            return self._code(0, [self.talker["spk_id"][speaker]])
        if embedding is None:
            return None
        row = torch.from_numpy(np.array(embedding, dtype=np.float32)).reshape(1, -1)
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

    def _surround(
        self,
        role: tuple[int, ...],
        language_id: int | None,
        speaker: str | None,
        embedding: bytes | None,
        reference: tuple[bytes, tuple[int, int]] | None,
        reference_text: str | None,
        non_streaming: bool,
    ) -> _Surroundings:
        """All rows of a layout but those of the text. Cached by content."""
        voice = self._voice_row(speaker, None if embedding is None else np.frombuffer(embedding, dtype=np.float32))
        head = torch.cat([self.text_rows(role), self._control(language_id, voice)])
        bos = self._code(0, [self.talker["codec_bos_id"]])
        codec, said, pad = bos, bos[:0], self.tts_pad
        if reference is not None:
            said = self.text_rows(self._ids(f"<|im_start|>assistant\n{reference_text}<|im_end|>\n")[3:-2])
            codec = torch.cat([bos, self._sum_codes(*reference)])
        if non_streaming:
            beside = self._code(0, [self.talker["codec_pad_id"]])
            before, after = torch.cat([head, said + beside]), torch.cat([codec + pad, pad, pad])
            speech_starts, room = 0, 0
        else:
            overlap = min(len(said), len(codec))
            before = torch.cat([head, said[:overlap] + codec[:overlap], said[overlap:]])
            beside = codec[overlap:]
            # the last two: the only trailing row of a text that ends before the reference, and the pad row
            after = torch.cat([beside + pad, pad, pad])
            speech_starts = len(head) + len(codec)
            room = len(codec) - len(said) if reference is not None else 0
        finite = all(bool(torch.isfinite(rows).all()) for rows in (before, beside, after))
        return _Surroundings(self._final(before), beside.numpy(), self._final(after), speech_starts, room, finite)

    # ---- pieces ------------------------------------------------------------------------------------------------

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text)

    def _framed_ids(self, text: str) -> tuple[int, ...]:
        """Three ids of the frame, those of the text, five of the frame. Kept for a while: two ask for one text."""
        return tuple(self._ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"))

    def _final(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, H] as it is copied to the talker. In pieces that torch converts without waking its threads."""
        if rows.dtype == self._dtype and not self._pinned:
            return rows
        out = torch.empty(rows.shape, dtype=self._dtype, pin_memory=self._pinned)
        step = max(1, GRAIN // self.hidden)
        for at in range(0, len(rows), step):
            out[at : at + step].copy_(rows[at : at + step])
        return out

    def _code(self, group: int, ids: list[int]) -> torch.Tensor:
        table = self._codec_table if group == 0 else self._group_tables[group - 1]
        return F.embedding(torch.tensor(ids, dtype=torch.int64), table).float()

    def _sum_codes(self, data: bytes, shape: tuple[int, int]) -> torch.Tensor:
        """One row per reference frame: the sum of its G code embeddings, float32 [frames, H]."""
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
