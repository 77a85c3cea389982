"""Scores of a run's clips: transcripts, error rates, similarity, opinion scores, checks. Never in the timed part.

Clips with the same samples, text and voice are scored once: an engine that gives the same audio under load costs
nothing to score again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from eval import asr, checks, mos, normalize, similarity, speakers, wer
from eval.datasets import Reference, Utterance
from eval.errors import EvalError
from eval.records import RequestRow

SCORED = ("ok", "unfinished")  # a runaway has audio and counts; a refused request has none and lowers the coverage


@dataclass(frozen=True)
class ScoreSettings:
    """Which models judge. Empty tuples leave a kind out."""

    asr: tuple[str, ...] = ("tiny.en",)
    speakers: tuple[str, ...] = ("ge2e",)
    mos: tuple[str, ...] = ("dnsmos", "distillmos")

    @classmethod
    def for_language(cls, language: str, **given: tuple[str, ...]) -> ScoreSettings:
        """The offline defaults: tiny.en for English, the multilingual base for everything else."""
        english = normalize.language_code(language) == "en"
        return cls(**({"asr": ("tiny.en",) if english else ("base",)} | given))

    @property
    def any(self) -> bool:
        return bool(self.asr or self.speakers or self.mos)


class Scorer:
    """Holds the loaded models; one clip at a time."""

    def __init__(
        self,
        settings: ScoreSettings,
        references: Mapping[str, Reference],
        utterances: Iterable[Utterance],
        language: str,
    ) -> None:
        self.settings = settings
        self.language = language
        self._normalizers = normalize.pair(language)
        self._words = self._normalizers[1]  # the forgiving one: checks shall not stumble over "50"
        self._utterances = {u.id: u for u in utterances}
        self._others = checks.OtherTexts({u.id: self._words.tokens(u.text) for u in self._utterances.values()})
        self._transcribers = [asr.load(name) for name in settings.asr]
        clips = {name: reference.pcm() for name, reference in references.items()}
        self._encoders = [similarity.References(speakers.load(name), clips) for name in settings.speakers]
        self._predictors = [mos.load(name) for name in settings.mos]
        self._reference_words = {name: self._words.tokens(r.transcript) for name, r in references.items()}
        self._paces = {
            name: checks.reference_pace(references[name].transcript, pcm.size / rate)
            for name, (pcm, rate) in clips.items()
        }
        self._known: dict[tuple[str, str, str], dict] = {}

    def models(self) -> dict[str, list[str]]:
        """Names as they stand beside the figures."""
        return {
            "asr": [t.name for t in self._transcribers],
            "normalizers": [n.name for n in self._normalizers],
            "speakers": [e.encoder.name for e in self._encoders],
            "mos": [p.name for p in self._predictors],
        }

    def levels(self) -> dict[str, dict[str, float | None]]:
        """Cosines between the different references, for each encoder: the level of "somebody else"."""
        out: dict[str, dict[str, float | None]] = {}
        for references in self._encoders:
            matrix = references.matrix()
            pairs = [v for a, row in matrix.items() for b, v in row.items() if a < b]
            out[references.encoder.name] = {
                "different_mean": float(np.mean(pairs)) if pairs else None,
                "different_max": max(pairs, default=None),
                "references": len(matrix),
            }
        return out

    def score(self, row: RequestRow, pcm: np.ndarray) -> dict:
        """The score row of one clip (int16 PCM). See `eval.summary` for how rows become figures."""
        key = (row.sha256, row.utterance, row.voice)
        if key not in self._known:
            self._known[key] = self._score(row, pcm.astype(np.float32) / 32768.0)
        names = {"id": row.id, "variant": row.variant, "cell": row.cell, "utterance": row.utterance, "voice": row.voice}
        return names | self._known[key]

    def _score(self, row: RequestRow, pcm: np.ndarray) -> dict:
        utterance = self._utterances.get(row.utterance) or Utterance(row.utterance, row.text)
        out: dict = {"wer": {}, "transcripts": {}, "similarity": {}, "mos": {}, "checks": None}
        for transcriber in self._transcribers:
            heard = transcriber.transcribe(pcm, row.sample_rate, language=self.language)
            out["transcripts"][transcriber.name] = asdict(heard)
            best = [self._best(utterance, heard, n) for n in self._normalizers]
            out["wer"][transcriber.name] = {
                n.name: errors.to_dict() | {"no_speech": heard.no_speech}
                for n, errors in zip(self._normalizers, best, strict=True)
            }
            if out["checks"] is None:
                out["checks"] = self._check(row, utterance, heard, best[1]).to_dict()
        for references in self._encoders:
            if row.voice in references.names:
                found = references.compare(row.voice, pcm, row.sample_rate)
                out["similarity"][references.encoder.name] = found.to_dict()
        for predictor in self._predictors:
            out["mos"][predictor.name] = mos.predict(predictor, pcm, row.sample_rate)
        return out

    def _best(self, utterance: Utterance, heard: asr.Transcript, n: normalize.Normalizer) -> wer.UtteranceErrors:
        """Against the text as written and as read out: a recogniser may write either."""
        tries = [
            wer.score(text, heard.text, n, no_speech=heard.no_speech)
            for text in (utterance.text, utterance.spoken)
            if text
        ]
        return min(tries, key=lambda errors: errors.rate)

    def _check(
        self, row: RequestRow, utterance: Utterance, heard: asr.Transcript, errors: wer.UtteranceErrors
    ) -> checks.Checks:
        return checks.check(
            utterance=utterance.id,
            heard=[] if heard.no_speech else self._words.tokens(heard.text),
            wanted=self._words.tokens(utterance.text) + self._words.tokens(utterance.spoken),
            reference=self._reference_words.get(row.voice, []),
            others=self._others,
            errors=errors,
            spoken_text=utterance.spoken or utterance.text,
            audio_s=row.audio_s,
            pace=self._paces.get(row.voice, checks.PACE),
        )


def score_rows(
    scorer: Scorer,
    rows: Iterable[RequestRow],
    read_pcm: Callable[[RequestRow], np.ndarray],
    on_score: Callable[[dict], None],
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Score rows one by one; `on_score` gets each at once, so that nothing is lost. Returns how many were done."""
    done = 0
    for row in rows:
        if stop():
            break
        if row.status not in SCORED or not row.audio:
            raise EvalError(f"request {row.id} has no audio to score", field="audio")
        on_score(scorer.score(row, read_pcm(row)))
        done += 1
    return done
