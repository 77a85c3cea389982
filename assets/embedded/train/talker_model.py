"""Talker, code predictor and speaker encoder as they are trained, and their published names.

The two transformers are transformers' Qwen3Model fed with embeddings: in Qwen3-TTS the three rows of its multimodal
rotary positions are always equal, which is plain rotary embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine.speaker import SpeakerEncoder

# Control ids, counted from the codebook's size: the order of the published checkpoints (2148 = 2048 + 100, ...).
CONTROL = {"pad": 100, "bos": 101, "eos": 102, "think": 106, "nothink": 107, "think_bos": 108, "think_eos": 109}
LANGUAGES = {"english": 2}


def control_ids(settings: dict) -> dict[str, int]:
    """Ids in the talker's codec table: the names of CONTROL and of LANGUAGES."""
    size = settings["codec"]["codebook_size"]
    return {name: size + offset for name, offset in (CONTROL | LANGUAGES).items()}


def qwen3(c: dict, dropout: float) -> Qwen3Model:
    """A decoder stack without a token table of its own; `dropout` acts on every layer's two branches."""
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_hidden_layers=c["num_hidden_layers"],
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        rope_parameters={"rope_type": "default", "rope_theta": c["rope_theta"]},
        max_position_embeddings=4096,
        attention_dropout=0.0,
        use_cache=False,
    )
    model = Qwen3Model(config)
    model.embed_tokens = None
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):  # one kernel instead of six
            module.forward = lambda x, m=module: F.rms_norm(x, x.shape[-1:], m.weight.to(x.dtype), m.variance_epsilon)
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda module, _, out: F.dropout(out, dropout, module.training))
        layer.self_attn.o_proj.register_forward_hook(lambda module, _, out: F.dropout(out, dropout, module.training))
    return model


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, L, D]."""
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


class Talker(nn.Module):
    """settings: the whole settings file; speakers: number of training speakers (for the auxiliary loss only)."""

    def __init__(self, settings: dict, speakers: int, dropout: float = 0.0) -> None:
        super().__init__()
        t, p, codec = settings["talker"], settings["predictor"], settings["codec"]
        width, size = t["hidden_size"], codec["codebook_size"]
        self.groups, self.size, self.dropout = codec["groups"], size, dropout
        self.text_embedding = nn.Embedding(t["text_vocab_size"], t["text_hidden_size"])
        self.fc1 = nn.Linear(t["text_hidden_size"], t["text_hidden_size"])
        self.fc2 = nn.Linear(t["text_hidden_size"], width)
        self.codec_embedding = nn.Embedding(size + 1024, width)
        self.model = qwen3(t, dropout)
        self.codec_head = nn.Linear(width, size + 1024, bias=False)
        self.group_embedding = nn.ModuleList([nn.Embedding(size, width) for _ in range(self.groups - 1)])
        self.to_predictor = nn.Linear(width, p["hidden_size"])
        self.predictor = qwen3(p, dropout / 2)
        self.heads = nn.ModuleList([nn.Linear(p["hidden_size"], size, bias=False) for _ in range(self.groups - 1)])
        self.speaker_encoder = SpeakerEncoder(settings["speaker_encoder"])
        # For training only: which speaker is heard, and what is said in the frame to come (4 x 20 ms).
        self.speaker_classes = nn.Parameter(torch.randn(speakers, width))
        self.phone_head = nn.Linear(width, 4 * 178)
        self.voice_phones = nn.Embedding(178, 32)
        self.voice_head = nn.Sequential(nn.Linear(width + 4 * 32, 384), nn.SiLU(), nn.Linear(384, codec["vq_dim"]))
        self.led: dict[int, dict[str, Tensor]] = {layer: {} for layer in settings["talker_training"]["led_layers"]}
        for layer, seen in self.led.items():
            attention = self.model.layers[layer].self_attn
            attention.q_norm.register_forward_hook(lambda m, i, out, seen=seen: seen.update(query=out[:, :, 0]))
            attention.k_norm.register_forward_hook(lambda m, i, out, seen=seen: seen.update(key=out[:, :, 0]))
        for table in (self.text_embedding, self.codec_embedding, *self.group_embedding):
            nn.init.normal_(table.weight, std=0.1)

    def text_table(self) -> Tensor:
        """[text vocabulary, width]: every text id, embedded and projected."""
        return self.fc2(F.silu(self.fc1(self.text_embedding.weight)))

    def embed(self, rows: dict[str, Tensor], speaker: Tensor) -> Tensor:
        """Input vectors [B, L, width] of `rows` (see layout.py; -1 means nothing there)."""

        def look(table: Tensor, ids: Tensor) -> Tensor:
            return F.embedding(ids.clamp(min=0), table) * (ids >= 0)[..., None]

        x = look(self.text_table(), rows["text"]) + look(self.codec_embedding.weight, rows["codec"])
        for group, table in enumerate(self.group_embedding):
            x = x + look(table.weight, rows["codes"][..., group])
        return x + rows["speaker"][..., None] * speaker[:, None]

    def forward(self, rows: dict[str, Tensor], speaker: Tensor) -> Tensor:
        """-> normed last hidden states [B, L, width]. Padding is on the right, so the causal mask suffices."""
        x = F.dropout(self.embed(rows, speaker), self.dropout / 2, self.training)
        return self.model(inputs_embeds=x).last_hidden_state

    def _predicted(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """hidden [N, width], codes [N, G] of groups 0 .. G - 1 -> the predictor's states [N, G, D] of groups 1 .. G."""
        tables = [self.codec_embedding, *self.group_embedding]
        parts = [hidden, *[F.embedding(c, t.weight) for c, t in zip(codes.T, tables, strict=False)]]
        return self.predictor(inputs_embeds=self.to_predictor(torch.stack(parts, 1))).last_hidden_state[:, 1:]

    def predict(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """hidden [N, width], codes [N, groups] -> logits [N, groups - 1, size] of groups 1 .. (teacher forced)."""
        h = self._predicted(hidden, codes[:, :-1])
        return torch.einsum("ngd,gvd->ngv", h, torch.stack([head.weight for head in self.heads]))

    def complete(self, hidden: Tensor, known: Tensor | None = None) -> Tensor:
        """hidden [N, width], known [N, k]: codes of the first k groups -> codes [N, groups]: of each frame what this
        talker would say, group by group the likeliest."""
        if known is None or not known.shape[1]:
            known = self.codec_head(hidden)[:, : self.size].argmax(1, keepdim=True)
        codes = known
        for head in self.heads[codes.shape[1] - 1 :]:
            codes = torch.cat([codes, head(self._predicted(hidden, codes)[:, -1]).argmax(1, keepdim=True)], 1)
        return codes

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Without dropout and gradients: what it would say, not what it learns."""
        training = self.training
        self.eval()
        with torch.no_grad():
            yield
        self.train(training)

    def spoken(self, hidden: Tensor, books: Tensor) -> Tensor:
        """hidden [N, width], codebooks [groups, size, vq_dim] -> [N, groups, vq_dim]: the codes' vectors of what this
        talker would say (`complete`), whose gradient is that of the mean over all codes (straight through)."""
        with self.at_rest():
            codes = self.complete(hidden)
        logits = torch.cat([self.codec_head(hidden)[:, None, : self.size], self.predict(hidden, codes)], 1)
        mean = torch.einsum("ngv,gvd->ngd", logits.float().softmax(-1), books)
        chosen = torch.stack([F.embedding(c, book) for c, book in zip(codes.T, books, strict=True)], 1)
        return chosen + mean - mean.detach()

    def drifted(self, batch: dict[str, Tensor], speaker: Tensor) -> dict[str, Tensor]:
        """The batch (examples.py) with what the talker would have said itself in those frames so far that `own` marks,
        as in parallel scheduled sampling (arXiv 1906.04331): speaking by itself it hears nothing else."""
        with self.at_rest():
            said = self.complete(self(batch, speaker).flatten(0, 1).index_select(0, batch["where"]))
        # Row r + 1 holds the frame that row r predicts; rows beyond `predicted` stay as they are.
        every = torch.full((batch["codec"].numel(), self.groups), -1, device=said.device)
        every = every.index_copy_(0, batch["where"] + 1, said).view(*batch["codec"].shape, -1)
        every = torch.where(batch["own"][..., None], every, -1)

        def heard(now: Tensor, own: Tensor) -> Tensor:
            return torch.where((own >= 0) & (now >= 0), own, now)  # what is hidden stays hidden

        codec, codes = heard(batch["codec"], every[..., 0]), heard(batch["codes"], every[..., 1:])
        return batch | {"codec": codec, "codes": codes}

    def phone_losses(self, hidden: Tensor, phones: Tensor) -> Tensor:
        """hidden [N, width], phones [N, 4] -> [N, 4]: only the text tells them ahead, so this makes the talker read."""
        logits = self.phone_head(hidden).float().view(-1, 178)
        return F.cross_entropy(logits, phones.flatten(), reduction="none").view_as(phones)

    def voice_losses(self, speaker: Tensor, phones: Tensor, latents: Tensor) -> Tensor:
        """speaker [N, width], phones [N, 4], acoustic latents of unit spread [N, vq_dim] -> [N, vq_dim]: how far
        the vector is from telling, by itself, how this voice sounds when it says these phonemes.

        A voice is told by the spectral envelope of its sounds, moment by moment; the mean over a clip, which a vector
        easily holds, is worth a third of that (embedded-voice.md, eleventh training).
        """
        x = torch.cat([speaker, self.voice_phones(phones).flatten(1).to(speaker.dtype)], -1)
        return (self.voice_head(x).float() - latents).square()

    def lead_loss(self, low: Tensor, high: Tensor) -> Tensor:
        """The first head of each led layer shall look where the text to be spoken is: rows low .. high [B, L] (-1: not
        known). Call it after `forward`. -> mean of -log of the attention that falls there.

        Without it the alignment of text and speech has to be discovered, which takes a small model very long (compare
        the guided attention of arXiv 1710.08969; here the alignment itself is known).
        """
        length, device = low.shape[1], low.device
        position = torch.arange(length, device=device)
        past = position[None] <= position[:, None]
        there = (position >= low[..., None]) & (position <= high[..., None]) & past
        known = there.any(-1)
        total = low.new_zeros((), dtype=torch.float32)
        for seen in self.led.values():
            cos, sin = self.model.rotary_emb(seen["query"], position[None])
            query, key = (_rotate(seen[name].float(), cos.float(), sin.float()) for name in ("query", "key"))
            scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
            share = [scores.masked_fill(~mask, -1e4).logsumexp(-1) for mask in (past, there)]
            total = total + ((share[0] - share[1]) * known).sum() / known.sum().clamp(min=1)
            seen.clear()
        return total / max(1, len(self.led))

    def speaker_loss(self, speaker: Tensor, who: Tensor) -> Tensor:
        """How well the vector tells the training speakers apart (scaled cosines)."""
        logits = 20 * F.normalize(speaker.float(), dim=-1) @ F.normalize(self.speaker_classes.float(), dim=-1).T
        return F.cross_entropy(logits, who)


RENAMED = {
    "text_embedding.": "talker.model.text_embedding.",
    "fc1.": "talker.text_projection.linear_fc1.",
    "fc2.": "talker.text_projection.linear_fc2.",
    "codec_embedding.": "talker.model.codec_embedding.",
    "model.": "talker.model.",
    "codec_head.": "talker.codec_head.",
    "group_embedding.": "talker.code_predictor.model.codec_embedding.",
    "to_predictor.": "talker.code_predictor.small_to_mtp_projection.",
    "predictor.": "talker.code_predictor.model.",
    "heads.": "talker.code_predictor.lm_head.",
    "speaker_encoder.": "speaker_encoder.",
}


def published_name(name: str) -> str | None:
    """None for what is only used in training."""
    for ours, theirs in RENAMED.items():
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return None


def export_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {published_name(k): v for k, v in state.items()}
    return {k: v.detach().float().cpu().contiguous() for k, v in renamed.items() if k}


def import_state(talker: Talker, published: dict[str, Tensor]) -> None:
    """Training goes on from shipped weights (the auxiliary speaker classes start anew)."""
    own = talker.state_dict()
    for name in own:
        if theirs := published_name(name):
            own[name] = published[theirs].float()
    talker.load_state_dict(own)
