"""What is tried: every transformer and UNet class of the installed diffusers that a small configuration can be made of.

Transformers are those of `tests.tiny.transformers`, UNets those of `tests.exact.denoisers` and of `unets`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import diffusers
from diffusers.models import transformers, unets
from torch import nn

from tests.exact import denoisers
from tests.tiny.transformers import TRANSFORMERS, UNBUILT
from tests.tiny.weights import enliven, seeded

from .unets import UNETS

DENOISER_NAMES = ("UNet", "Transformer")

USUAL = {
    "motion": "UNetMotionModel",
    "sd": "UNet2DConditionModel",
    "sdxl": "UNet2DConditionModel",
    "svd": "UNetSpatioTemporalConditionModel",
    "unconditional": "UNet2DModel",
    "unet3d": "UNet3DConditionModel",
}
"""Of the kinds of `denoisers` those that differ by more than a layer, and their classes."""
NO_DENOISER = {"MotionAdapter": "holds weights for UNetMotionModel, and has no forward of its own"}
"""Class -> why nothing is tried with it."""
SIZES = {True: ((19, 9), (12, 20)), False: ((20, 12), (12, 20))}
"""Rows and columns of the latents of UNets, by whether they take odd ones: bands of rows, then of columns. No number of
ranks tried gets bands of one size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A class of denoiser in one configuration; `latent` is the argument that is denoised.

    `call` gives fresh keyword arguments of variant 0 or 1, which differ in size.
    """

    name: str
    family: str
    latent: str
    build: Callable[[], nn.Module]
    call: Callable[[int], dict[str, Any]]


def subjects() -> list[Subject]:
    """All of them, ordered by name; the same class may come in several configurations."""
    found = [*_transformers(), *_usual_unets(), *_rare_unets()]
    return sorted(found, key=lambda each: (each.name, each.family))


def left_out(known: set[str]) -> dict[str, str]:
    """Classes of denoisers that are in the installed diffusers but not among `known`, and why."""
    reasons = UNBUILT | NO_DENOISER
    return {name: reasons.get(name, "no small configuration yet") for name in sorted(installed() - known)}


def installed() -> set[str]:
    """Names of all models in diffusers' folders of transformers and UNets, and of those called so elsewhere."""
    named = {name for name in dir(diffusers) if any(part in name for part in DENOISER_NAMES)}
    everywhere = {name for name in named if _is_model(getattr(diffusers, name))}
    return everywhere | {name for folder in (transformers, unets) for name in _models_in(folder)}


def _models_in(folder: ModuleType) -> Iterator[str]:
    for each in pkgutil.iter_modules(folder.__path__):
        if each.name.endswith("_flax"):  # of JAX, in older versions
            continue
        module = importlib.import_module(f"{folder.__name__}.{each.name}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if _is_model(kind) and kind.__module__ == module.__name__:
                yield name


def _is_model(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, diffusers.ModelMixin)


def _transformers() -> Iterator[Subject]:
    for name, tiny in TRANSFORMERS.items():
        yield Subject(name=name, family=tiny.family, latent=tiny.tokens, build=tiny.build, call=tiny.call)


def _usual_unets() -> Iterator[Subject]:
    for family, name in USUAL.items():
        yield _unet(name, family, denoisers.KINDS[family])


def _rare_unets() -> Iterator[Subject]:
    for name, kind in UNETS.items():
        if hasattr(diffusers, name):
            yield _unet(name, "", kind)


def _unet(name: str, family: str, kind: denoisers.Kind) -> Subject:
    def build() -> nn.Module:
        with seeded():
            model = enliven(kind.build().float().eval().requires_grad_(False))
        assert type(model).__name__ == name, f"{family} is a {type(model).__name__}"
        return model

    def call(variant: int) -> dict[str, Any]:
        return kind.arguments(*SIZES[kind.odd][variant])

    return Subject(name=name, family=family or "unet", latent=next(iter(call(0))), build=build, call=call)
