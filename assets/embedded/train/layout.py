"""A training example as the rows the talker sees at inference (reference: generate and generate_icl_prompt of
qwen_tts/core/models/modeling_qwen3_tts.py, qwen-tts 0.1.1; test: tests compare with engine/prompt.py).

Every row may have a text id, an id of the codec table, codes of groups 1 .. and the speaker vector; the input is the
sum of their embeddings. -1 means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ids:
    """The fixed ids of one checkpoint."""

    role: np.ndarray  # im_start, "assistant", newline
    tts_pad: int
    tts_bos: int
    tts_eos: int
    control: dict[str, int]  # talker_model.control_ids


@dataclass(frozen=True)
class Example:
    """text [n], codes [frames, groups]; a reference (text and codes) makes it an in-context example."""

    text: np.ndarray
    codes: np.ndarray
    reference_text: np.ndarray | None = None
    reference_codes: np.ndarray | None = None
    language: str | None = None
    streaming: bool = True


def build(ids: Ids, e: Example) -> dict[str, np.ndarray]:
    """-> text, codec, target int64 [L]; codes int64 [L, groups - 1]; speaker float32 [L]; said int64 [1].

    said: the row of the target text's first token; token k is at row said + k in every layout (past the last row: the
    clip ended before it was shown).

    target[i] is the code of group 0 (or the end id) that row i predicts, else -1; the frame that row i predicts is
    `frame[i]`, else -1.
    """
    c, frames, groups = ids.control, *e.codes.shape
    think = [c["think"], c["think_bos"], c[e.language], c["think_eos"]] if e.language else None
    think = think or [c["nothink"], c["think_bos"], c["think_eos"]]
    text = [*ids.role, *[ids.tts_pad] * (len(think) + 1), ids.tts_bos]
    codec = [-1, -1, -1, *think, -1, c["pad"]]
    speaker_at = len(codec) - 2
    said = np.append(e.text, ids.tts_eos)
    trailing = np.zeros(0, np.int64)
    first_reference = len(codec) + 1
    said_at = len(codec) + (0 if e.reference_text is None else len(e.reference_text))
    if e.reference_codes is not None:
        said = np.append(e.reference_text, said)
        heard = np.append(c["bos"], e.reference_codes[:, 0])
        if e.streaming:
            trailing = said[len(heard) :]
            said = np.append(said, np.full(max(0, len(heard) - len(said)), ids.tts_pad))[: len(heard)]
            text, codec = [*text, *said], [*codec, *heard]
        else:
            first_reference += len(said)
            text = [*text, *said, *[ids.tts_pad] * len(heard)]
            codec = [*codec, *[c["pad"]] * len(said), *heard]
    elif e.streaming:
        text, codec, trailing = [*text, said[0]], [*codec, c["bos"]], said[1:]
    else:
        text, codec = [*text, *said, ids.tts_pad], [*codec, *[c["pad"]] * len(said), c["bos"]]
    begin = len(text)  # rows from here on hold generated frames; row begin - 1 predicts frame 0
    length = begin + frames
    out = {
        "text": np.full(length, ids.tts_pad, np.int64),
        "codec": np.full(length, -1, np.int64),
        "codes": np.full((length, groups - 1), -1, np.int64),
        "speaker": np.zeros(length, np.float32),
        "target": np.full(length, -1, np.int64),
        "said": np.array([said_at]),
    }
    out["text"][:begin] = text
    followed = min(len(trailing), frames)
    out["text"][begin : begin + followed] = trailing[:followed]
    out["codec"][:begin], out["codec"][begin:] = codec, e.codes[:, 0]
    out["codes"][begin:] = e.codes[:, 1:]
    if e.reference_codes is not None:
        out["codes"][first_reference : first_reference + len(e.reference_codes)] = e.reference_codes[:, 1:]
    out["speaker"][speaker_at] = 1.0
    out["target"][begin - 1 : -1] = e.codes[:, 0]
    out["target"][-1] = c["eos"]
    return out
