"""The tensors a Qwen3-TTS config calls for, and the configs of the published sizes.

Two uses: comparing a checkpoint with its own config before anything is loaded, and measuring speed on
random weights of a published size without any file (`load_format: dummy`).

Sizes and ids of the published models are as reported in public copies of their `config.json`
(Qwen/Qwen3-TTS-12Hz-{0.6B,1.7B}-{Base,CustomVoice,VoiceDesign}).
"""

from __future__ import annotations

from typing import Any

Shape = tuple[int, ...]


def _attention(prefix: str, hidden: int, cfg: dict[str, Any]) -> dict[str, Shape]:
    heads, kv_heads = cfg["num_attention_heads"], cfg.get("num_key_value_heads") or cfg["num_attention_heads"]
    dim = cfg.get("head_dim") or hidden // heads
    shapes: dict[str, Shape] = {
        f"{prefix}q_proj.weight": (heads * dim, hidden),
        f"{prefix}k_proj.weight": (kv_heads * dim, hidden),
        f"{prefix}v_proj.weight": (kv_heads * dim, hidden),
        f"{prefix}o_proj.weight": (hidden, heads * dim),
        f"{prefix}q_norm.weight": (dim,),
        f"{prefix}k_norm.weight": (dim,),
    }
    if cfg.get("attention_bias"):
        shapes |= {f"{prefix}{n}_proj.bias": (shapes[f"{prefix}{n}_proj.weight"][0],) for n in "qkvo"}
    return shapes


def _layers(prefix: str, cfg: dict[str, Any]) -> dict[str, Shape]:
    hidden, inner = cfg["hidden_size"], cfg["intermediate_size"]
    shapes: dict[str, Shape] = {}
    for i in range(cfg["num_hidden_layers"]):
        layer = f"{prefix}layers.{i}."
        shapes |= _attention(f"{layer}self_attn.", hidden, cfg)
        shapes |= {
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {f"{prefix}norm.weight": (hidden,)}


def talker_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Name → shape of every `talker.*` tensor that `config` (a whole config.json) implies."""
    t = config["talker_config"]
    p = t["code_predictor_config"]
    hidden, text_hidden, groups = t["hidden_size"], t["text_hidden_size"], t["num_code_groups"]
    p_hidden, p_vocab = p["hidden_size"], p["vocab_size"]
    shapes: dict[str, Shape] = {
        "talker.model.codec_embedding.weight": (t["vocab_size"], hidden),
        "talker.model.text_embedding.weight": (t.get("text_vocab_size", 151936), text_hidden),
        "talker.text_projection.linear_fc1.weight": (text_hidden, text_hidden),
        "talker.text_projection.linear_fc1.bias": (text_hidden,),
        "talker.text_projection.linear_fc2.weight": (hidden, text_hidden),
        "talker.text_projection.linear_fc2.bias": (hidden,),
        "talker.codec_head.weight": (t["vocab_size"], hidden),
    }
    shapes |= _layers("talker.model.", t)
    predictor = "talker.code_predictor."
    for g in range(groups - 1):
        shapes[f"{predictor}model.codec_embedding.{g}.weight"] = (p_vocab, hidden)
        shapes[f"{predictor}lm_head.{g}.weight"] = (p_vocab, p_hidden)
    if p_hidden != hidden:
        shapes[f"{predictor}small_to_mtp_projection.weight"] = (p_hidden, hidden)
        shapes[f"{predictor}small_to_mtp_projection.bias"] = (p_hidden,)
    return shapes | _layers(f"{predictor}model.", p)


_LANGUAGES = tuple("chinese english german italian portuguese spanish japanese korean french russian".split())
_SPEAKERS = ("vivian", "serena", "uncle_fu", "dylan", "eric", "ryan", "aiden", "ono_anna", "sohee")


def published_config(name: str) -> dict[str, Any] | None:
    """config.json of a published size, e.g. "1.7b-base", "0.6b-customvoice", "1.7b-voicedesign"; None if unknown.

    Language and speaker ids are placeholders inside the control range: only geometry matters for random weights.
    """
    size, _, kind = name.lower().partition("-")
    types = {"base": "base", "customvoice": "custom_voice", "voicedesign": "voice_design"}
    widths = {"0.6b": (1024, 3072), "1.7b": (2048, 6144)}
    if size not in widths or kind not in types:
        return None
    hidden, inner = widths[size]
    rope = {"rope_theta": 1_000_000, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 32768}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    return {
        "model_type": "qwen3_tts",
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": size.replace(".", "b")[:3],
        "tts_model_type": types[kind],
        "im_start_token_id": 151644,
        "im_end_token_id": 151645,
        "tts_pad_token_id": 151671,
        "tts_bos_token_id": 151672,
        "tts_eos_token_id": 151673,
        "speaker_encoder_config": {"enc_dim": hidden, "sample_rate": 24000},
        "talker_config": {
            **rope,
            **heads,
            "vocab_size": 3072,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": 28,
            "num_code_groups": 16,
            "text_hidden_size": 2048,
            "text_vocab_size": 151936,
            "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "codec_eos_token_id": 2150,
            "codec_think_id": 2154,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_language_id": {n: 2050 + i for i, n in enumerate(_LANGUAGES)},
            "spk_id": {n: 3000 + i for i, n in enumerate(_SPEAKERS)} if kind == "customvoice" else {},
            "spk_is_dialect": dict.fromkeys(_SPEAKERS, False) if kind == "customvoice" else {},
            "code_predictor_config": {
                **rope,
                **heads,
                "vocab_size": 2048,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 5,
                "num_code_groups": 16,
            },
        },
    }


def published_codec_config() -> dict[str, Any]:
    """speech_tokenizer/config.json of the published 12 Hz codec; the encoder is MimiConfig's defaults."""
    return {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "encode_downsample_rate": 1920,
        "decode_upsample_rate": 1920,
        "encoder_config": {"model_type": "mimi"},
        "decoder_config": {
            "codebook_size": 2048,
            "codebook_dim": 512,
            "hidden_size": 512,
            "latent_dim": 1024,
            "max_position_embeddings": 8000,
            "rope_theta": 10000,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 64,
            "attention_bias": False,
            "sliding_window": 72,
            "intermediate_size": 1024,
            "hidden_act": "silu",
            "layer_scale_initial_scale": 0.01,
            "rms_norm_eps": 1e-5,
            "num_hidden_layers": 8,
            "num_quantizers": 16,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 1536,
        },
    }
