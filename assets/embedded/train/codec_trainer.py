"""One training of the codec: what a step does, how its losses pull, when the codes stand still. See train_codec.py."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from balance import Balance
from codec_losses import (
    Discriminators,
    Listener,
    discriminator_loss,
    generator_loss,
    heard,
    level_loss,
    mel_loss,
    wave_loss,
)
from codec_model import Codec, export_state, host_constants, import_state
from corpus import FRAME, Corpus, roughen
from recording import Recorder
from safetensors.torch import load_file, save_file
from spread import relative, respread, spread_loss
from together import Together
from torch import Tensor, nn
from voice_judge import VoiceJudge, stranger

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))

Stage = tuple[bool, bool, bool]  # codes frozen, discriminators at work, the encoder alone


class Trainer:
    def __init__(self, args: argparse.Namespace, together: Together) -> None:
        self.args, self.t, self.together, self.device = args, SETTINGS["codec_training"], together, together.device
        self.corpus = Corpus(args.corpus, self.device)
        self.codec = Codec(SETTINGS["codec"]).to(self.device)
        self.judge = Discriminators().to(self.device)
        self.judge.beside.enabled = args.side_by_side
        self.listener = Listener().to(self.device)
        self.voice = VoiceJudge(args.voice_judge).to(self.device) if args.voice_judge else None
        self.average: dict[str, Tensor] | None = None
        self.knows_judge = False  # the discriminators have learnt on this decoder's sound
        self.steps = 0
        if args.resume:
            self._resume(args.resume)
        host_constants(self.codec)
        if args.respread:
            self._respread()
        self.first = self.steps
        self.frozen = False
        self.encoder_only = False  # the decoder rests
        cuda = self.device.type == "cuda"
        adam = {"betas": (0.8, 0.99), "weight_decay": 1e-3, "fused": cuda, "capturable": cuda}
        # Rates are tensors on the device: a recorded step reads them where they are.
        self.rate, self.judge_rate, self.listener_rate = (torch.tensor(1e-3, device=self.device) for _ in range(3))
        listening = {"params": list(self.listener.parameters()), "lr": self.listener_rate}
        self.adam = torch.optim.AdamW([{"params": list(self.codec.parameters())}, listening], lr=self.rate, **adam)
        self.judge_adam = torch.optim.AdamW(self.judge.parameters(), lr=self.judge_rate, **adam)
        self.balance = Balance(self.t["shares"], self.t["weights"]["mel"], self.device)
        self.seen: list[Tensor] = []  # latents of the last step, for `revive`
        self.recorder = Recorder(cuda and not args.plain)
        self.taken: Counter[Stage] = Counter()  # steps of each stage

    def _resume(self, path: Path) -> None:
        if path.suffix == ".safetensors":
            import_state(self.codec, load_file(path))
            beside = path.with_name("judge.safetensors")
            state = {k: v.float() for k, v in load_file(beside).items()} if beside.exists() else {}
            for name, part in self._judges().items():
                own = {k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(name + ".")}
                if own:
                    part.load_state_dict(own)
            return
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.codec.load_state_dict(saved["codec"])
        self.judge.load_state_dict(saved["judge"])
        self.listener.load_state_dict(saved["listener"])
        self.average, self.steps, self.knows_judge = saved["average"], saved["steps"], saved["judged"]

    def _judges(self) -> dict[str, nn.Module]:
        """What only training needs of the small checkpoint."""
        heads = {"phone_head": self.codec.phone_head, "envelope_head": self.codec.envelope_head}
        return {"judge": self.judge, "listener": self.listener, **heads}

    def _respread(self) -> None:
        with torch.no_grad(), self.autocast():
            crops = [self.corpus.crops(64, self.t["crop_frames"])[0][:, :1] for _ in range(8)]
            respread(self.codec, torch.cat([self.codec.trunk(pcm).float().flatten(0, 1) for pcm in crops]))
            self.together.copy([*self.codec.parameters(), *self._book_values()])  # others chose other directions

    def freeze(self) -> None:
        """From here on the codes are what is shipped: encoder and codebooks rounded as they are stored."""
        self.frozen = True
        for name, value in [*self.codec.named_parameters(), *self.codec.named_buffers()]:
            if not name.startswith("decoder.") and value.is_floating_point():
                value.requires_grad_(False)
                if not name.startswith("books."):
                    value.copy_(value.half().float())
        for book in self.codec.books:
            book.sums.copy_(book.vectors().half().float())
            book.counts.fill_(1.0)
        if self.average is None:
            self.average = {k: v.detach().clone() for k, v in self.codec.decoder.named_parameters()}

    def learning(self) -> list[nn.Parameter]:
        return [p for p in [*self.codec.parameters(), *self.listener.parameters()] if p.requires_grad]

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def set_rates(self, progress: float, stage: Stage) -> None:
        t = self.t
        warm = min(1.0, (self.steps - self.first + 1) / t["warmup_steps"])
        # Discriminators first learn alone: what they want at the start would only spoil the decoder.
        late = warm
        if stage[1] and not self.knows_judge:
            late = min(1.0, max(0.0, self.taken[stage] / t["head_start_steps"] - 1))
        cut = t["freeze_from"]  # each of the two stages comes to rest by itself
        share = (progress - cut) / (1 - cut) if self.frozen else min(1.0, progress / cut)
        curve = 0.5 * (1 + math.cos(math.pi * share))
        for name, final in t["final_shares"].items():
            self.balance.shares[name].fill_(t["shares"][name] + (final - t["shares"][name]) * (1 - curve))
        decoding = t["decoder_learning_rate"] if self.frozen else t["learning_rate"]
        rates = (self.rate, late, decoding), (self.judge_rate, warm, t["discriminator_learning_rate"])
        # The listener must understand before it asks.
        for rate, part, peak in (*rates, (self.listener_rate, warm, t["learning_rate"])):
            rate.fill_(part * (t["final_learning_rate"] + (peak - t["final_learning_rate"]) * curve))

    def quantize(self, latents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """-> quantized semantic and acoustic vectors, commitment loss."""
        (semantic, acoustic), books = latents, self.codec.books
        keep = None
        if not self.frozen:
            batch, groups = len(semantic), self.codec.groups - 1
            fewer = torch.rand(batch, device=self.device) < self.t["quantizer_dropout"]
            keep = torch.where(fewer, torch.randint(groups, (batch,), device=self.device), groups)
        first, _, commit = books[0](semantic, None, not self.frozen)
        rest, codes, more = books[1](acoustic, keep, not self.frozen)
        if self.frozen:
            rest = self.mistake(codes)
        return first, rest, commit + relative(more, acoustic.flatten(0, 1))

    def mistake(self, codes: Tensor) -> Tensor:
        """codes [B, T, groups - 1] -> their vectors, some taken from other frames: a talker errs too."""
        t, flat = self.t, codes.flatten(0, 1)
        other = flat.gather(0, torch.randint(len(flat), flat.shape, device=self.device)).view_as(codes)
        rate = t["mistaken_codes"] * (torch.rand(len(codes), 1, 1, device=self.device) < t["mistaken"])
        codes = torch.where(torch.rand(codes.shape, device=self.device) < rate, other, codes)
        tables = self.codec.books[1].vectors()
        return torch.stack([F.embedding(codes[..., g], table) for g, table in enumerate(tables)]).sum(0)

    def step(self, progress: float) -> dict[str, Tensor]:
        """One step of training: its losses."""
        if progress >= self.t["freeze_from"] and not self.frozen:
            self.freeze()
        if not self.frozen:
            self._care_for_books()
        stage = (self.frozen, progress >= self.t["discriminate_from"], self.encoder_only)
        self.set_rates(progress, stage)
        measured = self.taken[stage] % self.t["measure_every"] == 0
        self.taken[stage] += 1
        self.steps += 1
        log = self.recorder.run((stage, measured), lambda: self.once(stage[1], measured))
        learnt = self.learning() if self.frozen else [*self.learning(), *self._book_values()]
        self.together.average([*learnt, *(self.judge.parameters() if stage[1] else ())], self.steps)
        return log

    def _book_values(self) -> list[Tensor]:
        return [value for book in self.codec.books for value in (book.counts, book.sums)]

    def _care_for_books(self) -> None:
        books = self.codec.books
        if self.first == self.steps and not books[0].begun.item():
            with torch.no_grad(), self.autocast():
                clean, *_ = self.corpus.crops(self.t["batch"], self.t["crop_frames"])
                latents = self.codec.latents(clean[:, :1])
            for book, x in zip(books, latents, strict=True):
                book.begin(x.flatten(0, 1))
        elif self.steps % 20 == 10 and self.seen:
            for book, x in zip(books, self.seen, strict=True):
                book.revive(x.flatten(0, 1), 0.05)
            self.together.copy(self._book_values())  # averages of entries revived apart would serve nobody

    def once(self, judged: bool, measured: bool) -> dict[str, Tensor]:
        t = self.t
        clean, phones = self.corpus.crops(t["batch"], t["crop_frames"])
        rough, real = roughen(clean, t["roughen"]).split(1, 1)
        with torch.no_grad() if self.frozen else nullcontext():
            with self.autocast():
                latents = self.codec.latents(rough)
            self.seen = [x.detach() for x in latents]
            semantic, acoustic, commitment = self.quantize(latents)
        log: dict[str, Tensor] = {}
        loss = real.new_zeros(())
        if not self.encoder_only:
            loss = self._decode(log, semantic, acoustic, real, phones, judged, measured)
        if not self.frozen:
            log["commitment"], log["spread"] = commitment, spread_loss(latents[1].flatten(0, 1))
            log["phone"], log["phone_accuracy"] = self.codec.phone_loss(semantic, phones)
            log["envelope"] = self.codec.envelope_loss(semantic, acoustic, real)
            loss = loss + sum(t["weights"][name] * log[name] for name in ("commitment", "spread", "phone", "envelope"))
        self.adam.zero_grad(set_to_none=True)
        loss.backward(inputs=self.learning())  # not the discriminators: they have their gradients already
        log["norm"] = nn.utils.clip_grad_norm_(self.codec.parameters(), 20.0)
        self.adam.step()
        if judged:
            nn.utils.clip_grad_norm_(self.judge.parameters(), 10.0)
            self.judge_adam.step()
        if self.frozen:
            with torch.no_grad():
                names, values = zip(*self.codec.decoder.named_parameters(), strict=True)
                torch._foreach_lerp_([self.average[n] for n in names], list(values), 0.002)
        return {k: v.detach() for k, v in log.items()}

    def _decode(
        self,
        log: dict[str, Tensor],
        semantic: Tensor,
        acoustic: Tensor,
        real: Tensor,
        phones: Tensor,
        judged: bool,
        measured: bool,
    ) -> Tensor:
        """The losses of decoded speech, which go into `log` -> how they pull together."""
        with self.autocast():
            x = self.codec.upsampled(semantic, acoustic)
            if self.frozen:
                x, real, phones = self._part(x, real, phones)
            made = self.codec.wave(x)
        if self.frozen:
            before = self.t["context_frames"]
            made, real, phones = made[..., before * FRAME :], real[..., before * FRAME :], phones[:, before:]
        fake = made.float()
        log["mel"], log["wave"] = mel_loss(fake, real, self.judge.beside), wave_loss(fake, real)
        log["level"] = level_loss(fake, real)
        with self.autocast():
            log |= heard(self.listener, real, fake, phones)
        if self.voice:
            log["stranger"] = stranger(self.voice, fake, real)
        if judged:
            log |= self._judge(fake, real)
        if measured:
            self.balance.measure(log, x)
        return self.balance.total(log) + log["listen"]

    def _part(self, x: Tensor, real: Tensor, phones: Tensor) -> tuple[Tensor, ...]:
        """A random part of the crops, the same frames of each: with what is judged, and its context, decoded alone. The
        transformer has heard the whole crop by then."""
        frames, count = phones.shape[1], self.t["judged_frames"] + self.t["context_frames"]
        at = torch.randint(frames - count + 1, (1,), device=self.device)

        def cut(values: Tensor, axis: int) -> Tensor:
            each = values.shape[axis] // frames
            return values.index_select(axis, at * each + torch.arange(count * each, device=self.device))

        return cut(x, 2), cut(real, 2), cut(phones, 1)

    def _judge(self, fake: Tensor, real: Tensor) -> dict[str, Tensor]:
        """One pass of the discriminators over a part of the crops serves both sides: their own gradients are left in
        `.grad`, and the losses returned reach the decoder through `fake`."""
        t = self.t
        at = torch.randint(fake.shape[-1] // FRAME - t["judged_frames"] + 1, (1,), device=self.device) * FRAME
        part = at + torch.arange(t["judged_frames"] * FRAME, device=self.device)
        with self.autocast():
            both = self.judge(torch.cat([real, fake]).index_select(-1, part))
        own = discriminator_loss(both)
        weights = list(self.judge.parameters())
        self.judge_adam.zero_grad(set_to_none=True)
        for weight, gradient in zip(weights, torch.autograd.grad(own, weights, retain_graph=True), strict=True):
            weight.grad = gradient
        fooled, features = generator_loss(both)
        return {"judge": own.detach(), "fooled": fooled, "features": features}

    def save(self) -> None:
        if self.together.rank:
            return
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        parts = {"codec": self.codec, "judge": self.judge, "listener": self.listener}
        state = {name: part.state_dict() for name, part in parts.items()} | {"average": self.average}
        judged = self.knows_judge or any(stage[1] for stage in self.taken)
        torch.save({**state, "steps": self.steps, "judged": judged}, out / "codec.pt.part")
        (out / "codec.pt.part").rename(out / "codec.pt")
        weights = export_state(self.codec)
        for name, value in (self.average or {}).items():
            if "_codebook" not in name:
                weights[f"decoder.{name}"] = value.cpu().contiguous()
        self.args.small.mkdir(parents=True, exist_ok=True)
        save_file({k: v.half() for k, v in weights.items()}, self.args.small / "codec.safetensors")
        judges = {
            f"{name}.{k}": v.half() for name, part in self._judges().items() for k, v in part.state_dict().items()
        }
        save_file(judges, self.args.small / "judge.safetensors")
        print(f"saved after {self.steps} steps", flush=True)
