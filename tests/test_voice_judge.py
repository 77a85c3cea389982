"""The speaker encoder that the talker's training listens to (assets/embedded/train/voice_judge.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import librosa
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "assets/embedded/train"))
import voice_judge

sys.path.pop(0)

RATE = 24000


def vowel() -> torch.Tensor:
    """PCM [1, 1.6 s]: harmonics of 125 Hz, the higher the weaker, and a little noise."""
    time = torch.arange(int(1.6 * RATE)) / RATE
    out = sum(torch.cos(2 * torch.pi * 125 * n * time + n) / n for n in range(1, 60))
    return (0.05 * out + 0.005 * torch.randn(len(time), generator=torch.Generator().manual_seed(1)))[None]


def numpy_lstm(x: np.ndarray, w: np.ndarray, r: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """ONNX's LSTM: x [T, in], w [4 H, in], r [4 H, H], bias [8 H], gates input, output, forget, cell -> last state."""
    size = r.shape[1]
    hidden, cell = np.zeros(size), np.zeros(size)
    for row in x:
        i, o, f, c = np.split(w @ row + r @ hidden + bias[: 4 * size] + bias[4 * size :], 4)
        cell = cell / (1 + np.exp(-f)) + np.tanh(c) / (1 + np.exp(-i))
        hidden = np.tanh(cell) / (1 + np.exp(-o))
    return hidden


def test_an_int8_lstm_becomes_the_same_one_in_torch():
    one, size, width = np.random.default_rng(0), 6, 5
    arrays = {"w": one.integers(-127, 127, (1, width, 4 * size), np.int8), "wz": np.array([3], np.int8)}
    arrays |= {"r": one.integers(-127, 127, (1, size, 4 * size), np.int8), "rz": np.array([-2], np.int8)}
    arrays |= {"ws": np.array([0.01], np.float32), "rs": np.array([0.02], np.float32)}
    arrays["b"] = one.standard_normal((1, 8 * size), np.float32)
    inputs = ["x", "w", "r", "b", "", "h", "c", "", "ws", "wz", "rs", "rz"]
    lstm = torch.nn.LSTM(width, size, batch_first=True)
    made = voice_judge.lstm_layer({name: torch.from_numpy(value) for name, value in arrays.items()}, inputs, 0)
    lstm.load_state_dict({name.removeprefix("lstm."): value for name, value in made.items()})
    x = one.standard_normal((9, width), np.float32)
    w, r = 0.01 * (arrays["w"][0].T.astype(float) - 3), 0.02 * (arrays["r"][0].T.astype(float) + 2)
    with torch.no_grad():
        found = lstm(torch.from_numpy(x)[None])[1][0][0, 0]
    np.testing.assert_allclose(found, numpy_lstm(x, w, r, arrays["b"][0]), atol=1e-5)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """With random weights."""
    file = tmp_path_factory.mktemp("judge") / "dvector.safetensors"
    torch.manual_seed(0)
    shell = {"lstm": torch.nn.LSTM(40, 768, 3, batch_first=True), "project": torch.nn.Linear(768, 256)}
    weights = {f"{part}.{name}": value for part, module in shell.items() for name, value in module.state_dict().items()}
    save_file(weights, file)
    return voice_judge.VoiceJudge(file)


def test_the_voice_judge_hears_what_the_d_vector_of_the_scores_hears(judge):
    """Its front end, and windows."""
    pcm = vowel()
    at16k = librosa.resample(pcm[0].numpy(), orig_sr=24000, target_sr=16000)
    recipe = {"sr": 16000, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 40, "window": "hamming"}
    power = librosa.feature.melspectrogram(y=at16k, center=False, **recipe)
    wanted = np.log10(power + 1e-10).T
    # The last band lies where resamplers differ.
    np.testing.assert_allclose(judge.log_mel(pcm)[0, 2:-2, :-1], wanted[2:-2, :-1], atol=0.05)
    pcm.requires_grad_()
    vector = judge(pcm)
    assert vector.shape == (1, 256) and vector.norm().item() == pytest.approx(1, abs=1e-5)
    vector[0, 0].backward()
    assert pcm.grad.abs().sum() > 0 and not any(p.requires_grad for p in judge.parameters())


def test_decoded_speech_is_no_stranger_to_itself_and_is_pulled_towards_its_speaker(judge):
    real = vowel()[None]
    assert voice_judge.stranger(judge, real, real).item() == pytest.approx(0, abs=1e-5)
    fake = (0.5 * real + 0.1 * torch.randn(real.shape, generator=torch.Generator().manual_seed(4))).requires_grad_()
    before = voice_judge.stranger(judge, fake, real)
    assert before.item() > 1e-4
    (slope,) = torch.autograd.grad(before, fake)
    nearer = (fake - 1e-3 * slope / slope.abs().max()).detach()
    assert voice_judge.stranger(judge, nearer, real) < before
