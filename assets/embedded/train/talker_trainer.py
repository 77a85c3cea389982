"""One training of the talker: what a step does and how it is judged on clips not trained on. See train_talker.py."""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from codec_model import Codec
from codec_model import import_state as import_codec
from corpus import FRAME, Corpus, roughen
from recording import Recorder
from safetensors.torch import load_file, save_file
from sounds import Sound
from talker_model import Talker, export_state, import_state
from together import Together
from torch import Tensor, nn
from voice_judge import VoiceJudge

from engine.speaker import mel_spectrogram

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))


class Trainer:
    def __init__(self, args: argparse.Namespace, versions: int, together: Together) -> None:
        """versions: of each speaker (encode_corpus.py)."""
        self.args, self.t, self.together, self.device = args, SETTINGS["talker_training"], together, together.device
        self.corpus = Corpus(args.corpus, self.device)
        self.speakers = int(self.corpus.speaker.max()) + 1
        sounds = [Sound.drawn(self.speakers, self.device, version) for version in range(1, versions)]
        self.sounds = Sound(*(torch.cat(parts) for parts in zip(*sounds, strict=True))) if sounds else None
        speakers = self.speakers * versions  # as many vectors to tell apart
        self.talker = Talker(SETTINGS, speakers, self.t["dropout"]).to(self.device)
        self.codec = Codec(SETTINGS["codec"])
        import_codec(self.codec, load_file(args.codec))
        self.codec.to(self.device).requires_grad_(False)
        self.judge = VoiceJudge(args.voice_judge).to(self.device) if args.voice_judge else None
        self.spread = self.codec.books[1].vectors().var(1).sum(0).sqrt()
        self.steps = 0
        saved: dict = {}
        if args.resume and args.resume.endswith(".pt"):
            saved = torch.load(args.resume, map_location=self.device, weights_only=True)
            self.talker.load_state_dict(saved["talker"])
            self.steps = saved["steps"]
        elif args.resume:
            parts = [load_file(path) for path in args.resume.split(",")]
            import_state(self.talker, {k: v for part in parts for k, v in part.items()})
        if args.reset:
            fresh = Talker(SETTINGS, speakers).state_dict()
            self.talker.load_state_dict({k: v for k, v in fresh.items() if k.startswith(args.reset)}, strict=False)
            saved.pop("adam", None)
            saved.pop("average", None)
        cuda = self.device.type == "cuda"
        self.rate = torch.tensor(1e-3, device=self.device)  # a recorded step reads it where it is
        self.first, self.best = self.steps, math.inf
        self.batches: dict[int, dict[str, Tensor]] = {}  # of each length: where a recorded step finds its batch
        self.recorder = Recorder(cuda and not args.plain, shared=True)
        matrices = [p for p in self.talker.parameters() if p.ndim > 1]
        others = [p for p in self.talker.parameters() if p.ndim <= 1]
        self.adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.t["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
            lr=self.rate,
            betas=(0.9, 0.95),
            fused=cuda,
            capturable=cuda,
        )
        if saved.get("adam"):
            self.adam.load_state_dict(saved["adam"])
            for group in self.adam.param_groups:
                group["lr"] = self.rate
        together.copy(self.talker.parameters())  # the vectors that tell speakers apart begin at random
        self.average = saved.get("average") or {k: v.detach().clone() for k, v in self.talker.named_parameters()}

    @torch.no_grad()
    def with_references(self, batch: dict[str, Tensor], frames: int) -> dict[str, Tensor]:
        """The batch with `pcm` [B, frames * 1920]: a random stretch of each clip, repeated where it is shorter, as its
        version of the speaker sounds; and `wanted`, the judge's vectors of those of `crops`."""
        length, start, samples = frames * FRAME, batch["start"], batch["samples"]
        shift = (torch.rand(len(start), device=self.device) * (samples - length).clamp(min=0)).long()
        index = (torch.arange(length, device=self.device)[None] + shift[:, None]) % samples[:, None]
        pcm = self.corpus.pcm[start[:, None] + index].float() / 32768
        if self.sounds:
            rows = (batch["version"] - 1).clamp(min=0) * self.speakers + batch["who"]
            otherwise = self.sounds.of(rows).hear(pcm[:, None])[:, 0].clamp(-1, 1)
            pcm = torch.where(batch["version"][:, None] > 0, otherwise, pcm)
        if self.judge:
            own = batch["crops"][:, 0].clamp(min=0) // batch["text"].shape[1]
            batch = batch | {"wanted": self.judge(pcm.index_select(0, own))}
        if self.talker.training:
            pcm = roughen(pcm[:, None], 0.4, filters=False)[:, 0]
        return batch | {"pcm": pcm}

    def latents(self, codes: Tensor) -> Tensor:
        """codes [N, groups] -> what the acoustic groups add up to [N, vq_dim], of about unit spread."""
        return self.codec.lookup(codes)[1] / self.spread

    def unlike(self, batch: dict[str, Tensor], hidden: Tensor) -> Tensor:
        """How far what the talker would say in the `crops` sounds from the reference's speaker: 1 - cosine, mean."""
        crops, (first, rest) = batch["crops"], (book.vectors() for book in self.codec.books)
        framed = hidden.index_select(0, crops.clamp(min=0).flatten())
        vectors = self.talker.spoken(framed, torch.cat([first, rest])).unflatten(0, crops.shape)
        sound = self.codec.wave(self.codec.upsampled(vectors[:, :, 0], vectors[:, :, 1:].sum(2)))
        heard = self.judge(sound[:, 0, self.t["judged_from"] * FRAME :].float())
        there = (crops[:, 0] >= 0).float()
        return ((1 - (heard * batch["wanted"]).sum(-1)) * there).sum() / there.sum().clamp(min=1)

    def losses(self, batch: dict[str, Tensor], drifted: bool = False) -> dict[str, Tensor]:
        """batch on the device, `with_references`. drifted: after frames of the talker's own where marked."""
        weight = batch["weight"] / batch["weight"].sum()

        def mean(losses: Tensor) -> Tensor:
            """[N, ...] of the predicted frames."""
            return (losses.flatten(1).mean(1) * weight).sum()

        cuda = self.device.type == "cuda"
        with torch.autocast("cuda", dtype=torch.bfloat16) if cuda else nullcontext():
            speaker = self.talker.speaker_encoder(mel_spectrogram(batch["pcm"]))
            if drifted:
                batch = self.talker.drifted(batch, speaker)
                torch.clear_autocast_cache()  # of weights that were cast without gradients
            hidden = self.talker(batch, speaker).flatten(0, 1)
            logits = self.talker.codec_head(hidden)
            framed = hidden.index_select(0, batch["where"])
            parts = self.talker.predict(framed, batch["frames"])
            told = speaker.index_select(0, batch["where"] // batch["text"].shape[1])  # of each frame's example
            voice = self.talker.voice_losses(told, batch["phones"], self.latents(batch["frames"]))
            unlike = self.unlike(batch, hidden) if self.judge else None
        log = {"code0": F.cross_entropy(logits.float(), batch["target"].flatten(), ignore_index=-1)}
        log["lead"] = self.talker.lead_loss(batch["low"], batch["high"])
        log["voice"] = mean(voice)
        log["phone"] = mean(self.talker.phone_losses(framed, batch["phones"]))
        by_group = F.cross_entropy(parts.float().flatten(0, 1), batch["frames"][:, 1:].flatten(), reduction="none")
        by_group = by_group.unflatten(0, (-1, parts.shape[1]))
        log["groups"], log["by_group"] = mean(by_group), (by_group.detach() * weight[:, None]).sum(0)
        log["speaker"] = self.talker.speaker_loss(speaker, batch["version"] * self.speakers + batch["who"])
        if unlike is not None:
            log["unlike"] = unlike
        return log

    def step(self, batch: dict[str, Tensor], progress: float) -> dict[str, Tensor]:
        """batch: from the loader. One step of training: its losses."""
        t, length = self.t, batch["text"].shape[1]
        warm = min(1.0, (self.steps - self.first + 1) / t["warmup_steps"])
        curve = 0.5 * (1 + math.cos(math.pi * progress))
        self.rate.fill_(warm * (t["final_learning_rate"] + (t["learning_rate"] - t["final_learning_rate"]) * curve))
        batch = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
        frames = t["reference_frames"][t["lengths"].index(length) % len(t["reference_frames"])]
        batch = self.with_references(batch, frames)  # not in the recorded step: torch.istft cannot be recorded
        if length not in self.batches:
            self.batches[length] = {key: value.clone() for key, value in batch.items()}
        placed = self.batches[length]
        for key, value in batch.items():
            placed[key].copy_(value)
        self.steps += 1
        log = self.recorder.run(length, lambda: self.once(placed))
        self.together.average(self.talker.parameters(), self.steps)
        return log

    def once(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        log = self.losses(batch, drifted=self.t["own_voice"] > 0)
        loss = log["code0"] + sum(weight * log[name] for name, weight in self.t["weights"].items() if name in log)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        log["norm"] = nn.utils.clip_grad_norm_(self.talker.parameters(), 1.0)
        self.adam.step()
        with torch.no_grad():
            names, values = zip(*self.talker.named_parameters(), strict=True)
            torch._foreach_lerp_([self.average[n] for n in names], list(values), 0.002)
        return {key: value.detach() for key, value in log.items()}

    @torch.no_grad()
    def validate(self, batches: list[dict[str, Tensor]]) -> dict[str, list[float]]:
        """Losses of the averaged weights on clips that are never trained on."""
        self.talker.eval()
        own = {k: v.detach().clone() for k, v in self.talker.named_parameters()}
        self._put(self.average)
        placed = [{key: value.to(self.device) for key, value in batch.items()} for batch in batches]
        placed = [self.with_references(batch, 50) for batch in placed]
        logs = [self.losses(batch) for batch in placed]
        for log, batch in zip(logs, placed, strict=True):
            # With the text of other clips: what the loss would be if the talker did not read.
            log["unread"] = self.losses(batch | {"text": batch["text"].roll(1, 0)})["code0"]
            # After frames of its own: what it loses by drifting.
            again = self.losses(batch | {"own": batch["codec"] >= 0}, drifted=True)
            log["astray"] = again["groups"]
            if self.judge:
                log["unlike_astray"] = again["unlike"]
        self._put(own)
        self.talker.train()
        mean = {k: torch.stack([log[k] for log in logs]).mean(0) for k in logs[0]}
        return {k: [round(x, 3) for x in v.flatten().tolist()] for k, v in mean.items()}

    def _put(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.talker.named_parameters():
            parameter.data.copy_(values[name])

    def save(self, validation: list[dict[str, Tensor]]) -> None:
        """Full state to --out; to --small, if they are the best so far on clips not trained on, the averaged weights in
        two float16 files (each below 16 MB). Of several the first one's, which are the others' too."""
        if self.together.rank:
            return
        found = self.validate(validation)
        print(f"validation after {self.steps} steps", found, flush=True)
        out, small = self.args.out, self.args.small
        out.mkdir(parents=True, exist_ok=True)
        small.mkdir(parents=True, exist_ok=True)
        state = {"talker": self.talker.state_dict(), "average": self.average, "steps": self.steps}
        torch.save(state | {"adam": self.adam.state_dict()}, out / "talker.pt.part")
        (out / "talker.pt.part").rename(out / "talker.pt")
        score = sum(found[name][0] for name in ("code0", "groups", "phone"))
        score += self.t["weights"]["unlike"] * found["unlike"][0] if self.judge else 0.0
        if score >= self.best:
            return
        self.best = score
        weights = {k: v.to(torch.float16) for k, v in export_state(self.average).items()}
        half, size, files = sum(v.numel() for v in weights.values()) / 2, 0, ({}, {})
        for name, value in weights.items():
            files[size + value.numel() > half][name] = value
            size += value.numel()
        for number, part in enumerate(files, 1):
            save_file(part, small / f"talker-{number}.safetensors")
        print(f"saved after {self.steps} steps", flush=True)
