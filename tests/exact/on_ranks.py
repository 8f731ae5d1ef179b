"""What the ranks of these tests run: one denoiser in bands, against the same denoiser by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.patched import PatchedDenoiser
from patchpar.strategies.exact import ExactPatch
from tests.exact import denoisers
from tests.ranks import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one size: in bands, and with every band alone."""

    split: float
    alone: float


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def first(output: Any) -> Tensor:
    return output[0]


def patched(place: Place, denoiser: nn.Module, split: str = "auto") -> PatchedDenoiser:
    return ExactPatch().install(denoiser, place.door(), place.mesh(patch=place.world)["patch"], split=split)


@torch.no_grad()
def parity(place: Place, name: str, sizes: Sequence[tuple[int, int]], split: str = "auto") -> list[Errors]:
    denoiser = denoisers.build(name)
    bands = patched(place, denoiser, split)
    found = []
    for height, width in sizes:
        call = denoisers.call(name, height, width)
        whole = first(denoiser(**call))
        errors = []
        for bands.exchanging in (True, False):
            errors.append(relative(first(bands.denoise(denoiser.forward, **call)), whole))
        found.append(Errors(split=errors[0], alone=errors[1]))
        bands.exchanging = True
    return found
