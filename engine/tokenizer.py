"""Text → ids with the checkpoint's own tokenizer; bytes for random weights that come without one."""

from __future__ import annotations

from collections.abc import Callable

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError

Tokenizer = Callable[[str], list[int]]


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer in the checkpoint folder (Qwen's byte-level BPE: vocab.json + merges.txt, or tokenizer.json).

    Raises:
        CheckpointError: no tokenizer files, or unreadable ones.
    """
    folder = checkpoint.path
    has_files = folder is not None and any((folder / n).is_file() for n in ("tokenizer.json", "vocab.json"))
    if not has_files:
        if checkpoint.load_format == "dummy":
            return _byte_tokenizer(checkpoint)
        raise CheckpointError(f"{folder} holds no tokenizer (vocab.json and merges.txt)", field="model")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers does not know model_type qwen3_tts and warns of it at every start
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}", field="model") from error
    finally:
        logging.set_verbosity(verbosity)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer(text)["input_ids"])
    return lambda text: backend.encode(text).ids  # the same ids; the wrapper around it takes longer than they do


def _byte_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """One id a byte, with the chat markers as single ids: enough to give random weights prompts of a real shape."""
    markers = {
        "<|im_start|>": [checkpoint.config["im_start_token_id"]],
        "<|im_end|>": [checkpoint.config["im_end_token_id"]],
        "assistant\n": [77091, 198],  # a word and a newline, as in Qwen's vocabulary
        "user\n": [872, 198],
    }

    def tokenize(text: str) -> list[int]:
        ids: list[int] = []
        while text:
            for marker, marker_ids in markers.items():
                if text.startswith(marker):
                    ids += marker_ids
                    text = text[len(marker) :]
                    break
            else:
                # about four letters a token, as byte-pair encoding has in English
                ids.append(256 + int.from_bytes(text[:2].encode()[:2], "big") % 60_000)
                cut = 1 if text[0] in "<\n" else min(4, len(text.split("<", 1)[0].split("\n", 1)[0]) or 1)
                text = text[cut:]
        return ids

    return tokenize
