"""Which text token is spoken during each phoneme: known from the words, because both sides list them in order.

    python align.py --pack pack --tokenizer ..      # adds `place` to pack/tokens.npz

The talker's attention is led by it (train_talker.py). Clips whose sides count different numbers of words (spelt-out
numbers, words that espeak runs together: 13 % of the clips) stay unmarked.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

SPACE = 16  # Kokoro's id of the blank between words
UNKNOWN = -1


def places(text: str, spans: list[tuple[int, int]], phones: np.ndarray) -> np.ndarray:
    """Index of the text token during each phoneme id, with the pads at both ends: int16 [len(phones) + 2].

    spans: first and last character (exclusive) of each token. The last pad gets len(spans): the end-of-text token.
    All UNKNOWN if the words cannot be matched.
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    blank = np.flatnonzero(phones == SPACE)
    begins, ends = np.append(-1, blank) + 1, np.append(blank, len(phones))
    out = np.full(len(phones) + 2, UNKNOWN, np.int16)
    if len(words) != len(begins) or (begins >= ends).any():
        return out
    token_at = np.zeros(len(text) + 1, np.int16)
    for index, (low, high) in enumerate(spans):
        token_at[low:high] = index
    for (low, high), begin, end in zip(words, begins, ends, strict=True):
        share = (np.arange(end - begin) + 0.5) / (end - begin)
        out[1 + begin : 1 + end] = token_at[(low + share * (high - low)).astype(int)]
        if begin:
            out[begin] = token_at[low]  # the blank belongs to the word to come
    out[0], out[-1] = 0, len(spans)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(args.tokenizer))
    jobs, tokens = np.load(args.pack / "jobs.npz"), dict(np.load(args.pack / "tokens.npz"))
    ids, offset = jobs["ids"], np.concatenate([[0], np.cumsum(jobs["count"])])
    texts = (args.pack / "texts.txt").read_text("utf-8").splitlines()
    head = "<|im_start|>assistant\n"
    made = []
    for clip, text in enumerate(texts):
        spans = tokenizer(head + text, return_offsets_mapping=True)["offset_mapping"][3:]
        spans = [(low - len(head), high - len(head)) for low, high in spans]
        made.append(places(text, spans, ids[offset[clip] : offset[clip + 1]]))
        if len(spans) != tokens["count"][clip]:
            raise SystemExit(f"clip {clip}: tokens.npz was made by another tokenizer; run bpe.py again")
    tokens["place"] = np.concatenate(made)
    np.savez_compressed(args.pack / "tokens.npz", **tokens)
    print(f"{np.mean([m[0] != UNKNOWN for m in made]):.3f} of {len(made)} clips marked")


if __name__ == "__main__":
    main()
