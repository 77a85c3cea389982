"""What the codec is judged by: mel spectra at several resolutions, and two kinds of discriminators."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from side_by_side import SideBySide
from torch import Tensor, nn

RATE = 24000
# FFT size, mel bands; hop is a quarter of the size (the scales of DAC, arXiv 2306.06546, without the smallest)
MEL_SCALES = ((64, 10), (128, 20), (256, 40), (512, 80), (1024, 120), (2048, 160))
WAVE_BANDS = ((50, 450), (450, 900), (900, 1500))  # Hz


@cache
def mel_matrix(fft: int, bands: int, device: torch.device) -> Tensor:
    """[bands, fft // 2 + 1] triangles of unit height on the HTK mel scale."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    bins = np.linspace(0, RATE / 2, fft // 2 + 1)
    rising = (bins[None] - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins[None]) / np.diff(edges)[1:, None]
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling)).astype(np.float32)).to(device)


@cache
def window(size: int, device: torch.device) -> Tensor:
    return torch.hann_window(size, device=device)


def spectrum(pcm: Tensor, fft: int, hop: int) -> Tensor:
    """[B, N] -> complex [B, F, T]"""
    return torch.stft(pcm, fft, hop, window=window(fft, pcm.device), return_complex=True)


def log_mel(pcm: Tensor, fft: int, bands: int, hop: int) -> Tensor:
    """PCM [B, N] -> log10 mels [B, bands, T]; what is 45 dB below speech of -23 dBFS counts as silence. (With a floor
    at -130 dBFS nearly all of a mel loss's gradient was that of digital silence.)"""
    magnitude = torch.view_as_real(spectrum(pcm, fft, hop)).square().sum(-1).add(1e-9).sqrt()
    return (mel_matrix(fft, bands, pcm.device) @ magnitude).clamp(min=1e-4 * fft**0.5).log10()


def mel_distance(both: Tensor, fft: int, bands: int) -> Tensor:
    """Mean absolute difference of log10 mels between the halves of `both` [2 B, N]."""
    return F.l1_loss(*log_mel(both, fft, bands, fft // 4).chunk(2))


def mel_loss(fake: Tensor, real: Tensor, beside: SideBySide) -> Tensor:
    """`mel_distance`, averaged over the scales. PCM [B, 1, N], float32."""
    both = torch.cat([fake, real])[:, 0]
    return torch.stack(beside([partial(mel_distance, both, *scale) for scale in MEL_SCALES], both)).mean()


def astray(made: Tensor, wanted: Tensor) -> Tensor:
    """How little two spectra [B, bands, bins, T, 2] (real, imaginary) point the same way in each band, whatever the
    size of the made one: 0 the same way, 1 unrelated, 2 against each other; bands count as they are loud."""
    one, two = (z.square().sum((2, 4)).add(1e-6).sqrt() for z in (made, wanted))
    return 1 - ((made * wanted).sum((2, 4)) / one).sum() / two.sum()


def wave_loss(fake: Tensor, real: Tensor) -> Tensor:
    """How little the complex spectra of each of WAVE_BANDS point the same way (`astray`). PCM [B, 1, N], float32.

    Mel losses are blind to phase, and with them alone the decoder made no harmonics. The phases of the training speech
    follow from pitch and timbre (pitch_grid.py), so they can be asked for. Not as a distance: that is smallest with no
    sound at all where the phase is not known, and took 5 to 8 dB from 0.6 to 2 kHz.
    """
    total = fake.new_zeros(())
    for fft in (512, 1024):
        both = torch.view_as_real(spectrum(torch.cat([fake, real])[:, 0], fft, fft // 4))
        for low, high in WAVE_BANDS:
            band = both[:, None, round(low * fft / RATE) : round(high * fft / RATE)]
            total = total + astray(*band.chunk(2))
    return total / 2 / len(WAVE_BANDS)


def level_loss(fake: Tensor, real: Tensor) -> Tensor:
    """Distance of the mean power in 40 mel bands, over 160 ms and over all, in decades. PCM [B, 1, N], float32.

    A mean absolute difference of log spectra asks for the median, which is below the mean wherever details cannot be
    foreseen; means of power over more time can be.
    """
    power = torch.view_as_real(spectrum(torch.cat([fake, real])[:, 0], 1024, 240)).square().sum(-1)
    mel = mel_matrix(1024, 40, real.device) @ power[..., : real.shape[-1] // 240]
    total = fake.new_zeros(())
    for steps in (16, mel.shape[-1]):
        whole = mel.shape[-1] // steps * steps
        made, wanted = mel[..., :whole].unflatten(-1, (-1, steps)).mean(-1).add(1e-4).log10().chunk(2)
        total = total + F.l1_loss(made, wanted)
    return total / 2


class Listener(nn.Module):
    """Hears phonemes: PCM [B, 1, N], N a multiple of 480 -> (features of every layer, logits [B, N / 480, phones]).

    Learns on real speech, of which they are known, and judges the decoder by what it hears: mel distances alone give
    consonants no more weight than any other 20 ms. (An ASR's features as a perceptual loss, made in place.)
    """

    def __init__(self, phones: int = 178, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 5, stride=2 if i == 0 else 1, padding=2 * d, dilation=d)
            for i, d in enumerate((1, 1, 2, 4, 1))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in self.layers)
        self.last = nn.Conv1d(width, phones, 1)

    def forward(self, pcm: Tensor) -> tuple[list[Tensor], Tensor]:
        with torch.autocast(pcm.device.type, enabled=False):
            magnitude = torch.view_as_real(spectrum(pcm[:, 0].float(), 1024, 240)).square().sum(-1).add(1e-9).sqrt()
            mel = (mel_matrix(1024, 80, pcm.device) @ magnitude).clamp(min=1e-4).log10()
            x = mel[..., : pcm.shape[-1] // 240] + 1.0
        x = F.gelu(self.first(x))
        features = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = F.gelu(norm(layer(x)))
            x = y if y.shape != x.shape else x + y
            features.append(x)
        return features, self.last(x).transpose(1, 2)


def heard(listener: Listener, real: Tensor, fake: Tensor, phones: Tensor) -> dict[str, Tensor]:
    """phones [B, T, 4] -> listen: its own loss on real speech; misheard: cross-entropy of phonemes on the decoded
    speech; unlike: distance of its features between the two. The last two move the codec only."""
    target = phones.flatten()
    features, logits = listener(real)
    out = {"listen": F.cross_entropy(logits.float().flatten(0, 1), target)}
    fixed = {name: value.detach() for name, value in listener.named_parameters()}
    again, logits = torch.func.functional_call(listener, fixed, (fake,))
    out["misheard"] = F.cross_entropy(logits.float().flatten(0, 1), target)
    out["unlike"] = unlike(features, again)
    return out


def unlike(real: list[Tensor], fake: list[Tensor]) -> Tensor:
    """Mean distance of the listener's features, layer by layer; moves what made `fake` only."""
    return torch.stack([(a.detach().float() - b.float()).abs().mean() for a, b in zip(real, fake, strict=True)]).mean()


class PeriodDiscriminator(nn.Module):
    """Looks at every p-th sample (HiFi-GAN, arXiv 2010.05646), with narrow layers."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period
        widths = (1, 32, 64, 128, 256, 256)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv2d(a, b, (5, 1), (3 if i < 4 else 1, 1), padding=(2, 0)))
            for i, (a, b) in enumerate(pairwise(widths))
        )
        self.last = nn.utils.parametrizations.weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, pcm: Tensor) -> list[Tensor]:
        length = pcm.shape[-1] // self.period * self.period
        x = pcm[..., :length].unflatten(-1, (-1, self.period))
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return [*features, self.last(x)]


class SpectrumDiscriminator(nn.Module):
    """Looks at one complex spectrogram (EnCodec, arXiv 2210.13438)."""

    def __init__(self, fft: int, width: int = 32) -> None:
        super().__init__()
        self.fft = fft
        norm = nn.utils.parametrizations.weight_norm
        kernels = ((3, 9, 1), (3, 9, 2), (3, 9, 2), (3, 9, 2), (3, 3, 1))
        self.layers = nn.ModuleList(
            norm(nn.Conv2d(2 if i == 0 else width, width, (t, f), (1, s), padding=(t // 2, f // 2)))
            for i, (t, f, s) in enumerate(kernels)
        )
        self.last = norm(nn.Conv2d(width, 1, (3, 3), padding=(1, 1)))

    def forward(self, pcm: Tensor) -> list[Tensor]:
        with torch.autocast(pcm.device.type, enabled=False):
            z = spectrum(pcm[:, 0].float(), self.fft, self.fft // 4) * self.fft**-0.5
            x = torch.view_as_real(z).permute(0, 3, 2, 1)  # [B, 2, T, F]
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return [*features, self.last(x)]


class Discriminators(nn.Module):
    GAIN = 8.0  # speech of -23 dBFS to about 0.6: at 0.07 the period discriminators hardly learnt and hardly pulled

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [PeriodDiscriminator(p) for p in (2, 3, 5, 7, 11)] + [SpectrumDiscriminator(n) for n in (2048, 1024, 512)]
        )
        self.beside = SideBySide(False)

    def forward(self, pcm: Tensor) -> list[list[Tensor]]:
        loud = self.GAIN * pcm
        return self.beside([partial(part, loud) for part in self.parts], loud)


def discriminator_loss(both: list[list[Tensor]]) -> Tensor:
    """Least squares: real (the first half of the batch) to 1, made to 0."""
    verdicts = [features[-1].float().chunk(2) for features in both]
    return 2 * torch.stack([torch.cat([1 - real, made]).square().mean() for real, made in verdicts]).mean()


class FeatureDistance(torch.autograd.Function):
    """Mean distance of each feature's second half from its first, relative to the first's size, of features whose first
    half of the batch is real and whose second is made; the gradient reaches the second only. A few kernels for all."""

    @staticmethod
    def forward(ctx, *features: Tensor) -> Tensor:
        real, fake = ([x.chunk(2)[side] for x in features] for side in (0, 1))
        gaps = torch._foreach_sub(fake, real)
        ctx.save_for_backward(*gaps)
        sizes = torch.stack(torch._foreach_norm(real, 1)).float()
        ctx.slopes = 1 / sizes / len(features)
        return (torch.stack(torch._foreach_norm(gaps, 1)).float() / sizes).mean()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        gaps, out = ctx.saved_tensors, []
        for gap, slope in zip(gaps, (gradient * ctx.slopes).to(gaps[0].dtype).unbind(), strict=True):
            whole = gap.new_zeros(2 * len(gap), *gap.shape[1:])
            torch.sign(gap, out=whole[len(gap) :]).mul_(slope)
            out.append(whole)
        return tuple(out)


def generator_loss(both: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """both: features of real and made speech in one batch, the last of each discriminator its verdict ->
    (adversarial, feature matching relative to the features' size)."""
    verdicts = [features[-1].chunk(2)[1].float() for features in both]
    fooled = torch.stack([(1 - verdict).square().mean() for verdict in verdicts]).mean()
    return fooled, FeatureDistance.apply(*[x for features in both for x in features[:-1]])
