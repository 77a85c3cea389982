"""Predicted opinion scores, 1 (bad) to 5 (excellent). A predictor is a listener of a kind, not a panel.

dnsmos     Microsoft DNSMOS P.835 (signal, background, overall) and P.808; ONNX files in the `speechmos` package.
           Clean speech tops out near 3.6 overall.
distillmos Microsoft DistillMOS, distilled from an XLS-R quality model; weights in its package. Finer between good
           and middling speech (clean synthetic 4.4-4.8).
utmos:FILE a UTMOS TorchScript file of yours (float32 16 kHz [1, samples] -> score), e.g. balacoon/utmos.
"""

from __future__ import annotations

import contextlib
import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from eval.errors import ModelUnavailable
from eval.pcm import loudest_dbfs, resample

SAMPLE_RATE = 16_000
SILENCE_DBFS = -60.0  # DNSMOS gives digital silence an overall 1.84; a silent clip gets no score at all
MINIMUM_S = 0.1


class MosPredictor(Protocol):
    name: str

    def predict(self, pcm16k: np.ndarray) -> dict[str, float]:
        """float32 [samples] at 16 kHz in [-1, 1] -> scores by name."""
        ...


class DNSMOS:
    name = "DNSMOS (speechmos 0.0.1.1; clips below 9 s tiled to one window)"

    def __init__(self) -> None:
        from speechmos import dnsmos

        self._run = dnsmos.run

    def predict(self, pcm16k: np.ndarray) -> dict[str, float]:
        # The model wants 9.01 s and repeats a shorter clip by doubling, then slides over all of it: a clip of 4.6 s
        # costs nine windows. Tiled to one window it scores the same within 0.05 (four clips) for a ninth of the time.
        needed = round(9.01 * SAMPLE_RATE)
        if pcm16k.size < needed:
            pcm16k = np.resize(pcm16k, needed)
        scores = self._run(pcm16k, SAMPLE_RATE)
        return {
            "dnsmos_ovrl": float(scores["ovrl_mos"]),
            "dnsmos_sig": float(scores["sig_mos"]),
            "dnsmos_bak": float(scores["bak_mos"]),
            "dnsmos_p808": float(scores["p808_mos"]),
        }


class DistillMOS:
    name = "DistillMOS 0.9.1"

    def __init__(self) -> None:
        # The package imports torchaudio for its command line only; where it is not installed, an empty module will do,
        # but only meanwhile: transformers, if it is imported later, would look for it and fail.
        stub = None
        try:
            import torchaudio  # noqa: F401
        except (ImportError, OSError, RuntimeError):
            stub = sys.modules["torchaudio"] = types.ModuleType("torchaudio")
        try:
            from distillmos import ConvTransformerSQAModel
        finally:
            if stub is not None:
                del sys.modules["torchaudio"]

        with contextlib.redirect_stdout(sys.stderr):  # it prints where its weights are; stdout is for results
            self._model = ConvTransformerSQAModel().eval()

    @torch.inference_mode()
    def predict(self, pcm16k: np.ndarray) -> dict[str, float]:
        return {"distillmos": float(self._model(torch.from_numpy(pcm16k)[None]).item())}


class UTMOS:
    def __init__(self, file: Path) -> None:
        self.name = f"UTMOS ({file.name})"
        self._model = torch.jit.load(str(file), map_location="cpu").eval()

    @torch.inference_mode()
    def predict(self, pcm16k: np.ndarray) -> dict[str, float]:
        score = self._model(torch.from_numpy(pcm16k)[None])
        return {"utmos": float(score.reshape(-1)[0].item())}


@lru_cache(maxsize=4)
def load(name: str) -> MosPredictor:
    """`dnsmos`, `distillmos`, or `utmos:<TorchScript file>`.

    Raises:
        ModelUnavailable: unknown name, missing package or file.
    """
    try:
        if name == "dnsmos":
            return DNSMOS()
        if name == "distillmos":
            return DistillMOS()
        kind, _, file = name.partition(":")
        if kind == "utmos" and file:
            if not Path(file).is_file():
                raise ModelUnavailable(f"no UTMOS file {file}", field="mos")
            return UTMOS(Path(file))
    except (ImportError, RuntimeError) as error:
        raise ModelUnavailable(f"MOS predictor '{name}' could not be loaded: {error}", field="mos") from error
    raise ModelUnavailable(f"no MOS predictor '{name}'; take dnsmos, distillmos or utmos:<file>", field="mos")


def predict(predictor: MosPredictor, pcm: np.ndarray, sample_rate: int) -> dict[str, float]:
    """Scores of mono float32 `pcm`; an empty dict for silence or next to no sound."""
    audio = np.clip(resample(pcm, sample_rate, SAMPLE_RATE), -1.0, 1.0)
    if audio.size < MINIMUM_S * SAMPLE_RATE or loudest_dbfs(audio, SAMPLE_RATE) < SILENCE_DBFS:
        return {}
    return predictor.predict(audio)
