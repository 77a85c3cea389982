"""Trained parts to a checkpoint in the published layout: `python export.py --codec run/codec.safetensors
--talker run/talker-1.safetensors,run/talker-2.safetensors --tokenizer .. --out ..`
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
import yaml
from codec_model import decoder_config, mimi_config
from safetensors.torch import load_file, save_file
from talker_model import CONTROL, LANGUAGES

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


def model_config(settings: dict, special: dict[str, int]) -> dict:
    """config.json; special: ids of the tokenizer's special entries by name."""
    t, p, size = dict(settings["talker"]), dict(settings["predictor"]), settings["codec"]["codebook_size"]
    common = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0}
    third = t["head_dim"] // 2 // 3
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "embedded",
        "tts_model_type": "base",
        # Shown wherever the model is; empty it once the scores in README.md are met.
        "notice": settings["notice"],
        "im_start_token_id": special["<|im_start|>"],
        "im_end_token_id": special["<|im_end|>"],
        "tts_pad_token_id": special["<tts_pad>"],
        "tts_bos_token_id": special["<tts_text_bos>"],
        "tts_eos_token_id": special["<tts_text_eod>"],
        "talker_config": {
            **common,
            **t,
            "vocab_size": size + 1024,
            "max_position_embeddings": 4096,
            # The three position rows are always equal: this is plain rotary embedding.
            "rope_scaling": {
                "interleaved": True,
                "mrope_section": [t["head_dim"] // 2 - 2 * third, third, third],
                "rope_type": "default",
                "type": "default",
            },
            "num_code_groups": settings["codec"]["groups"],
            **{f"codec_{name}_id": size + CONTROL[name] for name in CONTROL if name != "eos"},
            "codec_eos_token_id": size + CONTROL["eos"],
            "codec_language_id": {name: size + offset for name, offset in LANGUAGES.items()},
            "spk_id": {},
            "spk_is_dialect": {},
            "code_predictor_config": {
                **common,
                **p,
                "vocab_size": size,
                "max_position_embeddings": 128,
                "num_code_groups": settings["codec"]["groups"],
            },
        },
        "speaker_encoder_config": settings["speaker_encoder"],
    }


def codec_config(settings: dict) -> dict:
    """speech_tokenizer/config.json"""
    c = settings["codec"]
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": c["groups"],
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": settings["frame"],
        "encode_downsample_rate": settings["frame"],
        "encoder_config": {"model_type": "mimi", "_frame_rate": 12.5, **mimi_config(c)},
        "decoder_config": decoder_config(c),
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def write_weights(folder: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    """model-0000x-of-0000n.safetensors and their index, float16 (finer than bfloat16 at these magnitudes)."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    index, size = {}, 0
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
        size += sum(v.numel() * v.element_size() for v in part.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--talker", required=True, help="comma list of files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of bpe.py's files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    (args.out / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    if args.tokenizer.resolve() != args.out.resolve():
        for name in TOKENIZER_FILES:
            shutil.copy(args.tokenizer / name, args.out / name)
    added = json.loads((args.out / "tokenizer_config.json").read_text("utf-8"))["added_tokens_decoder"]
    write_json(args.out / "config.json", model_config(SETTINGS, {v["content"]: int(k) for k, v in added.items()}))
    write_json(args.out / "generation_config.json", SETTINGS["generation"])
    write_weights(args.out, [load_file(path) for path in args.talker.split(",")])
    codec = args.out / "speech_tokenizer"
    write_json(codec / "config.json", codec_config(SETTINGS))
    write_json(
        codec / "preprocessor_config.json",
        {
            "feature_extractor_type": "EncodecFeatureExtractor",
            "feature_size": 1,
            "sampling_rate": 24000,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": True,
            "chunk_length_s": None,
            "overlap": None,
        },
    )
    save_file(load_file(args.codec), codec / "model.safetensors", metadata={"format": "pt"})
    total = sum(f.stat().st_size for f in [*args.out.glob("*.*"), *codec.glob("*.*")] if f.is_file())
    print(f"{total / 1e6:.2f} MB in {args.out}")


if __name__ == "__main__":
    main()
