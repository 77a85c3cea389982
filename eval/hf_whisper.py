"""A Whisper of transformers (a folder or a hub id, e.g. openai/whisper-large-v3) as an openai-whisper model.

seed-tts-eval's published figures stand on whisper-large-v3 in that form; the weights are the same, the names differ.
"""

from __future__ import annotations

import re

import torch

_RENAMED = (  # applied in order to transformers' names
    (r"^model\.", ""),
    (r"^(encoder|decoder)\.layers\.", r"\1.blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"^decoder\.embed_tokens\.", "decoder.token_embedding."),
    (r"\.embed_positions\.weight$", ".positional_embedding"),
)


def rename(name: str) -> str:
    """transformers' name of a weight -> openai-whisper's."""
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def load(source: str, device: str = "cpu"):
    """An openai-whisper `Whisper` with the weights of `source`.

    Raises:
        OSError: no such folder or hub id, or no network.
        ValueError: not a Whisper.
    """
    from transformers import AutoConfig, WhisperForConditionalGeneration
    from whisper.model import ModelDimensions, Whisper

    config = AutoConfig.from_pretrained(source)
    if config.model_type != "whisper":
        raise ValueError(f"{source} is a {config.model_type}, not a whisper")
    theirs = WhisperForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    model = Whisper(
        ModelDimensions(
            n_mels=config.num_mel_bins,
            n_audio_ctx=config.max_source_positions,
            n_audio_state=config.d_model,
            n_audio_head=config.encoder_attention_heads,
            n_audio_layer=config.encoder_layers,
            n_vocab=config.vocab_size,
            n_text_ctx=config.max_target_positions,
            n_text_state=config.d_model,
            n_text_head=config.decoder_attention_heads,
            n_text_layer=config.decoder_layers,
        )
    )
    state = {rename(k): v for k, v in theirs.state_dict().items() if k != "proj_out.weight"}  # tied to the tokens
    model.load_state_dict(state)
    if heads := getattr(theirs.generation_config, "alignment_heads", None):  # for word times
        mask = torch.zeros(config.decoder_layers, config.decoder_attention_heads, dtype=torch.bool)
        for layer, head in heads:
            mask[layer, head] = True
        model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)
    return model.to(device).eval()
