"""What a reference clip says, by Whisper, and what may be wrong with it: words that do not fit, noise, voices."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.audio import Audio
from engine.request import SAMPLE_RATE

log = logging.getLogger("chorus.page")
ENGLISH_MODEL, OTHER_MODEL = "tiny.en", "base"
# Characters a second of ordinary reading; outside it, words are missing or too many. Latin script only.
SLOWEST, FASTEST = 5.0, 25.0
# DNSMOS background score: the bundled clips have 3.9 to 4.2, with white noise 20 dB below the voice 3.4, at 10 dB 2.4.
NOISY_BELOW = 3.3
# Cosine of the two most different groups of windows of a clip, by GE2E: one speaker 0.80 to 0.92, two speakers taking
# turns of four seconds at most 0.72 (docs/measurements/several-speakers.md).
SEVERAL_BELOW = 0.76
WINDOW_S, HOP_S, FEWEST_WINDOWS = 1.6, 0.8, 4


@dataclass(frozen=True)
class Heard:
    """`text` is None when nothing could be recognised; `problem` then says why."""

    text: str | None
    problem: str = ""


def warm_up() -> None:
    """Load the recogniser in the background: whoever opens the upload needs it some seconds later."""

    def load() -> None:
        try:
            from eval import asr

            asr.load(ENGLISH_MODEL)
        except Exception as error:
            log.info("speech recognition is not available: %s", error)

    threading.Thread(target=load, name="asr-warm-up", daemon=True).start()


def transcribe(audio: Audio, language: str = "auto") -> Heard:
    """Never raises: a page without speech recognition still clones voices."""
    try:
        from eval import asr

        name = ENGLISH_MODEL if language in ("auto", "english") else OTHER_MODEL
        code = None if language in ("auto", "english") else language
        heard = asr.load(name).transcribe(audio.pcm, SAMPLE_RATE, language=code)
    except Exception as error:
        log.warning("no automatic transcript: %s", error)
        return Heard(None, f"Speech recognition is not available ({error}). Type what the clip says.")
    if heard.no_speech:
        return Heard(None, "No speech was recognised in this clip: choose one with a single, clear speaker.")
    return Heard(heard.text.strip())


def doubts(heard: Heard, audio: Audio) -> list[str]:
    """Reasons to look at the transcript: references whose words do not fit make the model babble."""
    if heard.text is None:
        return [heard.problem]
    return rate_doubts(heard.text, audio.seconds)


def rate_doubts(text: str, seconds: float) -> list[str]:
    """By the number of characters for the length of the clip."""
    if not text or not text.isascii():
        return []
    rate = len(text) / seconds
    if SLOWEST <= rate <= FASTEST:
        return []
    what = "fewer" if rate < SLOWEST else "more"
    return [f"The transcript has {what} words than {seconds:.1f} s of speech would hold: check it."]


def noise_doubts(audio: Audio) -> list[str]:
    """By DNSMOS; nothing where it is not available."""
    try:
        from eval import mos

        scores = mos.predict(mos.load("dnsmos"), audio.pcm, SAMPLE_RATE)
    except Exception as error:
        log.info("the clip's noise is not judged: %s", error)
        return []
    background = scores.get("dnsmos_bak", 5.0)
    if background >= NOISY_BELOW:
        return []
    return [f"Noise or music is in the background (DNSMOS {background:.1f} of 5): the clone will have it too."]


def speaker_doubts(audio: Audio) -> list[str]:
    """Whether several people seem to speak, by the judge's speaker encoder; nothing where it is not available.

    A suspicion: an actor's voices look like several people, and turns shorter than a window go unnoticed.
    """
    try:
        from eval import speakers

        likeness = unlike_groups(windows(audio.pcm), speakers.load("ge2e"))
    except Exception as error:
        log.info("the clip's speakers are not compared: %s", error)
        return []
    if likeness is None or likeness >= SEVERAL_BELOW:
        return []
    return [
        f"Several speakers suspected (parts of the clip are alike by {likeness:.2f} only; one person has 0.8 or more): "
        "if more than one person speaks, cut the clip to one."
    ]


def windows(pcm: np.ndarray) -> list[np.ndarray]:
    """float32 [samples] at 24 kHz -> overlapping windows at the encoder's 16 kHz."""
    import soxr

    rate = 16_000
    pcm = soxr.resample(pcm, SAMPLE_RATE, rate)
    length, hop = round(WINDOW_S * rate), round(HOP_S * rate)
    return [pcm[at : at + length] for at in range(0, len(pcm) - length + 1, hop)]


def unlike_groups(pieces: list[np.ndarray], encoder: Any) -> float | None:
    """Cosine between the two groups that two-means finds among the windows' embeddings; None for too short a clip."""
    if len(pieces) < FEWEST_WINDOWS:
        return None
    each = np.stack([encoder.embed(piece) for piece in pieces])  # [windows, D], unit rows
    alike = each @ each.T
    first, second = np.unravel_index(alike.argmin(), alike.shape)
    centres = each[[first, second]]
    for _ in range(10):
        nearest = (each @ centres.T).argmax(1)
        if len(set(nearest)) < 2:
            break
        centres = np.stack([each[nearest == group].mean(0) for group in (0, 1)])
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    return float(centres[0] @ centres[1])
