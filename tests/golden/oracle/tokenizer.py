"""A small byte-level BPE in Qwen's file format, learnt from the sentences below; chat words are single tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 420
# The order in which the published tokenizer numbers them, after its ordinary tokens.
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
# Qwen2's way of cutting text into words, from the tokenizer.json of any Qwen2 model.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "The morning ferry leaves at seven and comes back before the shops close.",
    "She wrote the answer on a card, folded it twice, and put it in her pocket.",
    "When the lights went out, everyone in the room began to talk at once.",
    "There is a small garden behind the station where the drivers drink their tea.",
    "Please read this sentence slowly and in a friendly, warm voice.",
)


def write(folder: Path) -> dict[str, int]:
    """Writes vocab.json, merges.txt and tokenizer_config.json; returns the ids of the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["assistant", "user"] * 20 + list(TEXT) * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = model["vocab"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    ids = {name: len(vocabulary) + i for i, name in enumerate(SPECIALS)}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for name, i in ids.items()
        },
        "additional_special_tokens": list(SPECIALS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return ids
