"""A small byte-level BPE in Qwen's tokenizer files, and the training texts as ids.

    python bpe.py --texts pack/texts.txt --out ..  --tokens pack/tokens.npz

The merges are learnt on the training text. The chat layout needs "assistant" and "user" as one id each, so the merges
that complete these two words come last, where they disturb no other word.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
WHOLE_WORDS = ("assistant", "user")
# How Qwen2's tokenizer cuts text before merging.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def learn(texts: list[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """-> vocabulary of size - len(SPECIAL) entries, merges in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    room = sum(len(word) - 1 for word in WHOLE_WORDS)
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL) - room,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(model["vocab"])
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split()) for m in model["merges"]]
    for word in WHOLE_WORDS:
        left, *rest = tokenizer.encode(word).tokens
        for piece in rest:
            if left + piece not in vocab:
                merges.append((left, piece))
                vocab[left + piece] = len(vocab)
            left += piece
    while len(vocab) < size - len(SPECIAL):  # what the two words did not need
        vocab[f"<unused{len(vocab)}>"] = len(vocab)
    return vocab, merges


def write(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """vocab.json, merges.txt, tokenizer_config.json as in the published checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), "utf-8")
    added = {
        str(len(vocab) + i): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, name in enumerate(SPECIAL)
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL[1:]),
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
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="one clip's text a line")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer files; kept if they exist")
    parser.add_argument("--tokens", type=Path, required=True)
    args = parser.parse_args()
    texts = args.texts.read_text("utf-8").splitlines()
    if not (args.out / "vocab.json").is_file():
        write(args.out, *learn(texts, SETTINGS["talker"]["text_vocab_size"]))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(args.out))
    head = tokenizer("<|im_start|>assistant\n")["input_ids"]
    tail = tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    if len(head) != 3 or len(tail) != 5:
        raise SystemExit(f"the chat layout does not hold: {head}, {tail}")
    ids = [tokenizer(f"<|im_start|>assistant\n{text}")["input_ids"][3:] for text in texts]
    np.savez_compressed(
        args.tokens,
        ids=np.concatenate([np.array(i, np.uint16) for i in ids]),
        count=np.array([len(i) for i in ids], np.int32),
        role=np.array(head),
        special=np.array(tokenizer.convert_tokens_to_ids(list(SPECIAL))),
    )
    letters, count = sum(map(len, texts)), sum(map(len, ids))
    print(f"{len(tokenizer)} entries, {letters / count:.2f} letters an id, {count} ids")


if __name__ == "__main__":
    main()
