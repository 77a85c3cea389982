"""Does the clip sound like its reference? Cosine to the own reference, and which of N references is nearest.

Both are taken on the whole clip and on its first second: a foreign voice at the start is a known fault of batched
serving (another request's state) that an average over the clip hides.

Different speakers score high too (GE2E's outputs are not negative): 28 English synthetic voices, 344 clips, gave
same speaker 0.92 +- 0.03, different 0.59 +- 0.09. So read a cosine beside these levels, and beside the nearest-of-N
share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from eval.pcm import audible_onset, resample
from eval.speakers import MINIMUM_S, SAMPLE_RATE, SpeakerEncoder

START_S = 1.0


@dataclass(frozen=True)
class Similarity:
    """Of one clip; cosines in [-1, 1], None where there is too little sound.

    Attributes:
        model: the encoder's name; cosines of different encoders do not compare.
        whole, start: to the own reference, over the clip and over its first audible second.
        nearest, nearest_start: name of the closest reference of all.
        margin: own cosine minus the best other one; negative when another voice is closer.
    """

    model: str
    whole: float | None
    start: float | None
    nearest: str | None
    nearest_start: str | None
    margin: float | None

    def to_dict(self) -> dict:
        return asdict(self)


class References:
    """Embedded reference clips by name."""

    def __init__(self, encoder: SpeakerEncoder, clips: Mapping[str, tuple[np.ndarray, int]]) -> None:
        """From name -> (mono float32 [samples], Hz); one clip for each speaker, or "nearest" means little."""
        self.encoder = encoder
        self._vectors = {name: encoder.embed(resample(pcm, rate, SAMPLE_RATE)) for name, (pcm, rate) in clips.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._vectors)

    def matrix(self) -> dict[str, dict[str, float]]:
        """Cosine of every pair: the level that different speakers reach with this encoder."""
        return {a: {b: float(u @ v) for b, v in self._vectors.items()} for a, u in self._vectors.items()}

    def compare(self, own: str, pcm: np.ndarray, sample_rate: int) -> Similarity:
        """Score mono float32 `pcm` against the reference `own` and against all others."""
        audio = resample(pcm, sample_rate, SAMPLE_RATE)
        onset = audible_onset(audio, SAMPLE_RATE)
        if onset is None or audio.size - onset < MINIMUM_S * SAMPLE_RATE:
            return Similarity(self.encoder.name, None, None, None, None, None)
        whole = self._cosines(audio)
        start = self._cosines(audio[onset : onset + round(START_S * SAMPLE_RATE)])
        others = [cosine for name, cosine in whole.items() if name != own]
        return Similarity(
            model=self.encoder.name,
            whole=whole[own],
            start=start[own],
            nearest=max(whole, key=whole.__getitem__),
            nearest_start=max(start, key=start.__getitem__),
            margin=whole[own] - max(others) if others else None,
        )

    def _cosines(self, audio: np.ndarray) -> dict[str, float]:
        vector = self.encoder.embed(audio)
        return {name: float(vector @ reference) for name, reference in self._vectors.items()}
