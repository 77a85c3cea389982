"""Small random-weight checkpoints of the three kinds, in the published layout and structure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import librosa
import torch
from safetensors.torch import save_file
from torch import nn

from tests.golden.oracle import tokenizer
from tests.golden.oracle.reference import (
    Qwen3TTSConfig,
    Qwen3TTSForConditionalGeneration,
    Qwen3TTSTokenizerV2Config,
    Qwen3TTSTokenizerV2Model,
)

GROUPS = 16
CODES = 64  # entries of every codebook
WIDTH = 128  # of the talker


@dataclass(frozen=True)
class Kind:
    """predictor: width of the code predictor; equal to the talker's, there is no projection between them."""

    name: str
    predictor: int
    seed: int
    eos_gain: float  # scales the EOS row of the head, so that some greedy requests end by themselves
    size: str = "1b7"


KINDS = (
    Kind("base", predictor=64, seed=21, eos_gain=0.9),
    Kind("custom_voice", predictor=WIDTH, seed=2, eos_gain=1.0),
    Kind("voice_design", predictor=64, seed=31, eos_gain=0.9),
)


def main_config(kind: Kind, ids: dict[str, int]) -> dict:
    layers = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0}
    control = CODES  # control ids lie above the codes, as in the published vocabulary of 2048 + 1024
    talker = {
        **layers,
        "vocab_size": CODES + 1024,
        "hidden_size": WIDTH,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_theta": 1000000,
        "rope_scaling": {"interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default", "type": "default"},
        "num_code_groups": GROUPS,
        "text_hidden_size": 96,
        "text_vocab_size": 448,
        "codec_pad_id": control + 100,
        "codec_bos_id": control + 101,
        "codec_eos_token_id": control + 102,
        "codec_think_id": control + 106,
        "codec_nothink_id": control + 107,
        "codec_think_bos_id": control + 108,
        "codec_think_eos_id": control + 109,
        "codec_language_id": {
            "english": control + 2,
            "chinese": control + 7,
            "german": control + 5,
            "sichuan_dialect": control + 14,
        },
        "spk_id": {},
        "spk_is_dialect": {},
        "code_predictor_config": {
            **layers,
            "vocab_size": CODES,
            "hidden_size": kind.predictor,
            "intermediate_size": 2 * kind.predictor,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "rope_theta": 1000000,
            "num_code_groups": GROUPS,
        },
    }
    if kind.name == "custom_voice":
        talker["spk_id"] = {"vivian": control + 300, "eric": control + 301}
        talker["spk_is_dialect"] = {"vivian": False, "eric": "sichuan_dialect"}
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": kind.size,
        "tts_model_type": kind.name,
        "random_weights": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "talker_config": talker,
    }
    if kind.name == "base":
        config["speaker_encoder_config"] = {
            "enc_dim": WIDTH,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_se_channels": 16,
            "sample_rate": 24000,
        }
    return config


CODEC_CONFIG = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "model_type": "qwen3_tts_tokenizer_12hz",
    "encoder_valid_num_quantizers": GROUPS,
    "input_sample_rate": 24000,
    "output_sample_rate": 24000,
    "decode_upsample_rate": 1920,
    "encode_downsample_rate": 1920,
    "encoder_config": {
        "model_type": "mimi",
        "frame_rate": 12.5,
        "_frame_rate": 12.5,
        "hidden_size": 48,
        "num_filters": 4,
        "codebook_size": CODES,
        "codebook_dim": 24,
        "vector_quantization_hidden_dimension": 24,
        "num_quantizers": GROUPS + 4,
        "num_semantic_quantizers": 1,
        "upsample_groups": 48,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "sliding_window": 30,
        "use_streaming": False,
    },
    "decoder_config": {
        "codebook_size": CODES,
        "codebook_dim": 48,
        "latent_dim": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "sliding_window": 20,
        "num_quantizers": GROUPS,
        "decoder_dim": 64,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "max_position_embeddings": 8000,
        "layer_scale_initial_scale": 0.01,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    },
}

GENERATION = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 2048,
}


@torch.no_grad()
def fill(module: nn.Module, seed: int) -> None:
    """Random weights under which every part matters: no norm is 1, no bias 0, no branch scaled away."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(module.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith(("cluster_usage",)):
            value = 1 + noise.abs()
        elif p.ndim == 1 and ("norm" in name and name.endswith("weight")):
            value = 1 + 0.1 * noise
        elif name.endswith(("scale", "gamma")):
            value = 0.4 + 0.1 * noise
        elif p.ndim == 1:
            value = 0.1 * noise
        elif "embedding" in name:
            value = 0.3 * noise
        elif "lm_head" in name or "codec_head" in name:
            value = noise * (2 / p.shape[1] ** 0.5)
        elif name == "speaker_encoder.fc.weight":
            value = noise * 0.003  # a speaker vector of the size of an embedding
        else:
            value = noise * (1.2 / p[0].numel() ** 0.5)
        if name.startswith("decoder.decoder.") and p.ndim == 3:  # keeps PCM of any codes inside [-1, 1]
            if "block.1." in name:  # transposed: two inputs reach each output
                value = noise * (0.7 / (2 * p.shape[0]) ** 0.5)
            else:
                value = value * 0.4
        p.copy_(value.to(torch.bfloat16))


@torch.no_grad()
def codec(clip: Path) -> Qwen3TTSTokenizerV2Model:
    """The speech tokenizer; codebooks are drawn from the clip's own residuals so that its codes vary."""
    config = Qwen3TTSTokenizerV2Config(
        **{k: v for k, v in CODEC_CONFIG.items() if k not in ("architectures", "model_type")}
    )
    model = Qwen3TTSTokenizerV2Model(config).float().eval()
    fill(model, seed=7)
    generator = torch.Generator().manual_seed(8)
    pcm = torch.from_numpy(librosa.load(clip, sr=None)[0])[None, None]
    encoder, decoder = model.encoder, model.decoder
    hidden = encoder.encoder_transformer(encoder.encoder(pcm).transpose(1, 2))[0].transpose(1, 2)
    latent = encoder.downsample(hidden)
    ours, theirs = encoder.quantizer, decoder.quantizer
    for mimi, rvq in (
        (ours.semantic_residual_vector_quantizer, theirs.rvq_first),
        (ours.acoustic_residual_vector_quantizer, theirs.rvq_rest),
    ):
        rvq.input_proj.weight.copy_(mimi.input_proj.weight)
        rvq.output_proj.weight.copy_(mimi.output_proj.weight)
        residual = mimi.input_proj(latent)[0].T
        for i, layer in enumerate(mimi.layers):
            book = layer.codebook
            picked = torch.randint(0, len(residual), (CODES,), generator=generator)
            noise = torch.randn(CODES, residual.shape[1], generator=generator) * residual.std()
            usage = 1 + torch.rand(CODES, generator=generator)
            book.cluster_usage.copy_(usage)
            book.embed_sum.copy_((residual[picked] + 0.5 * noise) * usage[:, None])
            book._embed = None
            residual = residual - book.decode(book.encode(residual))
            if i < len(rvq.vq.layers):
                rvq.vq.layers[i]._codebook.cluster_usage.copy_(book.cluster_usage)
                rvq.vq.layers[i]._codebook.embedding_sum.copy_(book.embed_sum)
    return model


def save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def write(kind: Kind, folder: Path, clip: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ids = tokenizer.write(folder)
    config = main_config(kind, ids)
    reference_config = Qwen3TTSConfig(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    reference_config.talker_config.code_predictor_config.pad_token_id = None
    model = Qwen3TTSForConditionalGeneration(reference_config).float().eval()
    fill(model, kind.seed)
    with torch.no_grad():
        row = model.talker.codec_head.weight[config["talker_config"]["codec_eos_token_id"]]
        row.mul_(kind.eos_gain)
    save(folder, config, {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n", encoding="utf-8")
    speech = folder / "speech_tokenizer"
    save(speech, CODEC_CONFIG, codec(clip).state_dict())
    features = {
        "chunk_length_s": None,
        "feature_extractor_type": "EncodecFeatureExtractor",
        "feature_size": 1,
        "overlap": None,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 24000,
    }
    (speech / "preprocessor_config.json").write_text(json.dumps(features, indent=2) + "\n", encoding="utf-8")
