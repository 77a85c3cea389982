"""The codec as it is trained: transformers' MimiModel encoder, residual quantizer, the engine's 12 Hz decoder.

Codebooks are learnt as moving averages of the vectors they serve (as in VQ-VAE-2 and EnCodec). The first group also has
to tell which phoneme is spoken (`phone_head`, dropped at export), which makes it the easy, semantic group. All groups
together have to tell the mel spectrum (`envelope_head`, dropped as well).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from codec_losses import log_mel
from corpus import FRAME
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel

from engine.codec.decoder import CodecDecoder

PHONES_PER_FRAME = 4  # one label every 20 ms
ENVELOPE = 1024, 80, 240  # FFT size, mel bands, hop


def mimi_config(c: dict) -> dict:
    """`encoder_config` of speech_tokenizer/config.json."""
    return {
        **c["encoder"],
        "codebook_size": c["codebook_size"],
        "codebook_dim": c["vq_dim"],
        "vector_quantization_hidden_dimension": c["vq_dim"],
        "num_quantizers": c["groups"],
        "num_semantic_quantizers": 1,
        "upsample_groups": c["encoder"]["hidden_size"],
        "sampling_rate": 24000,
        "frame_rate": 12.5,
        "use_causal_conv": True,
        "use_cache": False,
    }


def decoder_config(c: dict) -> dict:
    """`decoder_config` of speech_tokenizer/config.json."""
    return {
        **c["decoder"],
        "codebook_size": c["codebook_size"],
        "codebook_dim": 2 * c["vq_dim"],
        "num_quantizers": c["groups"],
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 8000,
    }


class Codebooks(nn.Module):
    """`groups` residual codebooks, trained by moving averages; vectors = sums / counts."""

    def __init__(self, groups: int, size: int, width: int, decay: float = 0.99) -> None:
        super().__init__()
        self.size, self.decay = size, decay
        self.register_buffer("counts", torch.ones(groups, size))
        self.register_buffer("sums", torch.randn(groups, size, width))
        self.register_buffer("begun", torch.zeros(()))

    def vectors(self) -> Tensor:
        """[groups, size, width]"""
        return self.sums / self.counts.clamp(min=1e-5)[..., None]

    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """First vectors: random residuals of a batch [N, width]."""
        for sums, counts in zip(self.sums, self.counts, strict=True):
            pick = torch.randint(len(x), (self.size,), device=x.device)
            sums.copy_(x[pick] + 0.01 * x.std() * torch.randn_like(x[pick]))
            counts.fill_(1.0)
            x = x - sums[torch.cdist(x[None], sums[None])[0].argmin(-1)]
        self.begun.fill_(1.0)

    def forward(self, x: Tensor, keep: Tensor | None = None, learn: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] float32 -> (quantized with straight-through gradient, codes [B, T, groups], commitment).

        keep: [B] number of groups used by each row (quantizer dropout), or None for all.
        """
        vectors, residual, total, codes = self.vectors(), x, torch.zeros_like(x), []
        commitment = x.new_zeros(())
        for group, table in enumerate(vectors):
            flat = residual.reshape(-1, x.shape[-1])
            with torch.no_grad():
                distance = table.square().sum(-1)[None] - 2 * flat @ table.T
                index = distance.argmin(-1)
            chosen = F.embedding(index, table).view_as(residual)
            used = torch.ones(len(x), 1, 1, device=x.device)
            if keep is not None:
                used = (keep > group).float()[:, None, None]
            commitment = commitment + (used * (residual - chosen.detach()).square()).mean()
            if learn:
                self._learn(group, flat.detach(), index)
            total = total + used * chosen.detach()
            residual = residual - chosen.detach()
            codes.append(index.view(x.shape[:2]))
        return x + (total - x).detach(), torch.stack(codes, -1), commitment

    @torch.no_grad()
    def _learn(self, group: int, flat: Tensor, index: Tensor) -> None:
        hits = torch.zeros(self.size, device=flat.device).index_add_(0, index, torch.ones_like(flat[:, 0]))
        sums = torch.zeros_like(self.sums[group]).index_add_(0, index, flat)
        self.counts[group].lerp_(hits, 1 - self.decay)
        self.sums[group].lerp_(sums, 1 - self.decay)

    @torch.no_grad()
    def revive(self, x: Tensor, threshold: float) -> None:
        """Moves entries that serve fewer than `threshold` vectors a step onto random residuals of x [N, width]."""
        for sums, counts in zip(self.sums, self.counts, strict=True):
            table = sums / counts.clamp(min=1e-5)[:, None]
            dead = (counts < threshold)[:, None]
            pick = x[torch.randint(len(x), (self.size,), device=x.device)]
            sums.copy_(torch.where(dead, pick * threshold, sums))
            counts.copy_(torch.where(dead[:, 0], torch.full_like(counts, threshold), counts))
            x = x - table[torch.cdist(x[None], table[None])[0].argmin(-1)]


class Codec(nn.Module):
    """settings: the `codec` section."""

    def __init__(self, settings: dict, phones: int = 178) -> None:
        super().__init__()
        c = settings
        self.groups, self.width = c["groups"], c["vq_dim"]
        mimi = MimiModel(MimiConfig(**mimi_config(c)))
        # transformers moved these modules between versions; their weights are named the same at export.
        inner = mimi.encoder if hasattr(mimi.encoder, "encoder_transformer") else mimi
        self.seanet = inner.encoder_seanet if inner is not mimi else mimi.encoder
        self.transformer, self.downsample = inner.encoder_transformer, inner.downsample
        for module in self.seanet.modules():
            if isinstance(module, nn.Conv1d):  # MimiModel's own start is far too small for training from nothing
                nn.init.kaiming_uniform_(module.weight, a=5**0.5)
        hidden = c["encoder"]["hidden_size"]
        self.project = nn.ModuleList([nn.Conv1d(hidden, self.width, 1, bias=False) for _ in range(2)])
        self.books = nn.ModuleList(
            [
                Codebooks(1, c["codebook_size"], self.width),
                Codebooks(c["groups"] - 1, c["codebook_size"], self.width),
            ]
        )
        self.decoder = CodecDecoder(decoder_config(c))
        for block in self.decoder.upsample:
            nn.init.constant_(block[1].gamma, 0.1)
        self.phone_head = nn.Sequential(
            nn.Linear(self.width, 256), nn.GELU(), nn.Linear(256, PHONES_PER_FRAME * phones)
        )

        bands = ENVELOPE[1] * FRAME // ENVELOPE[2]
        self.envelope_head = nn.Sequential(
            nn.Conv1d(2 * self.width, 512, 3, padding=1),
            nn.GELU(),
            nn.Conv1d(512, 512, 1),
            nn.GELU(),
            nn.Conv1d(512, bands, 1),
        )

    def latents(self, pcm: Tensor) -> list[Tensor]:
        """pcm [B, 1, N], N a multiple of 1920 -> semantic and acoustic latents, [B, T, width] each, float32."""
        h = self.trunk(pcm).transpose(1, 2)
        return [p(h).transpose(1, 2).float() for p in self.project]

    def trunk(self, pcm: Tensor) -> Tensor:
        """What the two projections see: [B, T, hidden]."""
        h = self.seanet(pcm)
        h = self.transformer(h.transpose(1, 2))[0].transpose(1, 2)
        return self.downsample(h).transpose(1, 2)

    def encode(self, pcm: Tensor) -> Tensor:
        """[B, 1, N] -> codes [B, T, groups]."""
        return torch.cat([book(x)[1] for book, x in zip(self.books, self.latents(pcm), strict=True)], -1)

    def upsampled(self, semantic: Tensor, acoustic: Tensor) -> Tensor:
        """Quantized vectors [B, T, width] -> [B, latent, T * 4]: the cheap part of the decoder behind its codebooks."""
        d = self.decoder
        x = d.quantizer.rvq_first.output_proj(semantic.transpose(1, 2))
        x = x + d.quantizer.rvq_rest.output_proj(acoustic.transpose(1, 2))
        x = d.pre_transformer(d.pre_conv(x).transpose(1, 2)).transpose(1, 2)
        for upsample, block in d.upsample:
            x = block(upsample(x))
        return x

    def wave(self, x: Tensor) -> Tensor:
        """What `upsampled` gives -> PCM [B, 1, T * 1920]: the dear part."""
        for layer in self.decoder.decoder:
            x = layer(x)
        return x

    def lookup(self, codes: Tensor) -> list[Tensor]:
        """codes [B, T, groups] -> quantized vectors, semantic and acoustic."""
        first, rest = (book.vectors() for book in self.books)
        acoustic = sum(F.embedding(codes[..., g + 1], table) for g, table in enumerate(rest))
        return [F.embedding(codes[..., 0], first[0]), acoustic]

    def phone_loss(self, semantic: Tensor, phones: Tensor) -> tuple[Tensor, Tensor]:
        """semantic [B, T, width], phones [B, T, 4] -> (cross-entropy, accuracy)."""
        logits = self.phone_head(semantic).unflatten(-1, (PHONES_PER_FRAME, -1)).float()
        loss = F.cross_entropy(logits.flatten(0, 2), phones.flatten())
        return loss, (logits.argmax(-1) == phones).float().mean()

    def envelope_loss(self, semantic: Tensor, acoustic: Tensor, pcm: Tensor) -> Tensor:
        """How far the mel spectrum of pcm [B, 1, T * 1920] is from what the quantized vectors [B, T, width] tell of it:
        mean absolute difference in decades.

        The way to the encoder through the decoder is long and noisy: after nine trainings without this loss its latents
        told less of the mel spectrum than the spectrum's first 16 principal components do.
        """
        fft, bands, hop = ENVELOPE
        mel = log_mel(pcm[:, 0].float(), fft, bands, hop)[..., : pcm.shape[-1] // hop]
        mel = mel.unflatten(2, (-1, FRAME // hop))
        told = self.envelope_head(torch.cat([semantic, acoustic], -1).transpose(1, 2))
        return F.l1_loss(told.float().unflatten(1, (bands, -1)), mel.transpose(2, 3))


def host_constants(module: nn.Module) -> None:
    """MimiConv1d keeps its stride and padding as tensors; on the GPU every use of them would wait for it."""
    for child in module.modules():
        for name in ("stride", "kernel_size", "padding_total"):
            value = getattr(child, "_buffers", {}).get(name)
            if isinstance(value, Tensor):
                child._buffers[name] = value.cpu()


def export_state(codec: Codec) -> dict[str, Tensor]:
    """Weights under the published names of speech_tokenizer/model.safetensors."""
    out: dict[str, Tensor] = {}
    for prefix, module in (
        ("encoder.encoder.", codec.seanet),
        ("encoder.encoder_transformer.", codec.transformer),
        ("encoder.downsample.", codec.downsample),
    ):
        out |= {prefix + k: v for k, v in module.state_dict().items()}
    out |= {f"decoder.{k}": v for k, v in codec.decoder.state_dict().items() if "_codebook" not in k}
    names = ("semantic_residual_vector_quantizer", "acoustic_residual_vector_quantizer"), ("rvq_first", "rvq_rest")
    for side, book in enumerate(codec.books):
        mimi, ours = f"encoder.quantizer.{names[0][side]}.", f"decoder.quantizer.{names[1][side]}."
        out[mimi + "input_proj.weight"] = codec.project[side].weight
        hidden = codec.project[side].weight.shape[1]
        # Only a decoder uses it, and the encoder's side has none; the format wants the tensor.
        out[mimi + "output_proj.weight"] = torch.zeros(hidden, codec.width, 1)
        for group, table in enumerate(book.vectors()):
            out[f"{mimi}layers.{group}.codebook.initialized"] = torch.ones(1)
            out[f"{mimi}layers.{group}.codebook.cluster_usage"] = torch.ones(len(table))
            out[f"{mimi}layers.{group}.codebook.embed_sum"] = table
            out[f"{ours}vq.layers.{group}._codebook.cluster_usage"] = torch.ones(len(table))
            out[f"{ours}vq.layers.{group}._codebook.embedding_sum"] = table
    return {k: v.detach().float().cpu().contiguous().clone() for k, v in out.items()}


def import_state(codec: Codec, state: dict[str, Tensor]) -> None:
    """The reverse of `export_state`: training goes on from shipped weights."""
    state = {k: v.float() for k, v in state.items()}

    def part(prefix: str) -> dict[str, Tensor]:
        return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}

    codec.seanet.load_state_dict(part("encoder.encoder."))
    codec.transformer.load_state_dict(part("encoder.encoder_transformer."))
    codec.downsample.load_state_dict(part("encoder.downsample."))
    codec.decoder.load_state_dict(part("decoder."))
    for side, name in enumerate(("semantic_residual_vector_quantizer", "acoustic_residual_vector_quantizer")):
        prefix = f"encoder.quantizer.{name}."
        codec.project[side].weight.data.copy_(state[prefix + "input_proj.weight"])
        book = codec.books[side]
        book.counts.fill_(1.0)
        for group in range(len(book.sums)):
            book.sums[group].copy_(state[f"{prefix}layers.{group}.codebook.embed_sum"])
        book.begun.fill_(1.0)
