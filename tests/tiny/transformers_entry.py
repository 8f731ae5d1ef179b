"""What an entry of the registry of tiny transformers is, and the sizes and inputs its calls are drawn from.

Shapes: B batch, S image tokens, T text tokens, C channels, F frames, H and W rows and columns of patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from .copies import Copies
from .weights import enliven, seeded

BATCH = 2
IMAGE = ((5, 7), (6, 8))
IMAGE_TEXT = (12, 24)
"""35 image tokens: uneven on 2 and 3 ranks, 12 on the first of 3, as many as of text. 48: 24 on each of 2, likewise."""
VIDEO = ((5, 5, 5), (2, 4, 6))
VIDEO_TEXT = (42, 24)
"""125 image tokens and 48, chosen in the same way."""
AUDIO = (35, 48)
"""Tokens of sequences without rows."""

Call = Callable[[int], dict[str, Any]]
COPIES = Copies()
"""Of the transformers that this process has built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A transformer class of diffusers, a configuration of it in small, and calls for it.

    `call(variant)` gives keyword arguments; the variants 0 and 1 have different numbers of tokens.
    `tokens` is the argument to be denoised and `layout` its dimensions, `output_layout` those of what comes out where
    they differ. `empty` names the ends of parameters that the class leaves uninitialised. `isolated` says why the
    first token does not see the last, and `fixed` why there is one number of tokens only; else they are empty.
    """

    name: str
    family: str
    config: Mapping[str, Any]
    call: Call
    tokens: str = "hidden_states"
    layout: str = "BSC"
    output_layout: str = ""
    empty: tuple[str, ...] = ()
    isolated: str = ""
    fixed: str = ""

    def build(self) -> nn.Module:
        """The same weights every time: CPU, fp32, random, with attention that decides the result."""
        return COPIES.of(repr((self.name, self.config, self.empty)), self._built)

    def _built(self) -> nn.Module:
        with seeded():
            model = getattr(diffusers, self.name)(**self.config)
            model = model.float().eval().requires_grad_(False)
            for name, parameter in model.named_parameters():
                if name.endswith(self.empty):
                    parameter.zero_()
            return _open_gates(enliven(model))


def _open_gates(model: nn.Module) -> nn.Module:
    """Gates and scales made of the time are next to nothing at first: here they matter. In place; returns the model."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is None and module.out_features >= 3 * module.in_features:
            module.weight.mul_(3)
    for name, parameter in model.named_parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
        elif name.endswith("bias"):
            parameter.add_(0.4 * torch.randn_like(parameter))
        elif "scale_shift_table" in name or "to_out" in name or name.endswith("modulation"):
            parameter.mul_(2)
    return model


def noise(*shape: int, seed: int = 0) -> Tensor:
    """The same values for the same shape and seed, on every rank and in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + sum(shape)))


def ragged(length: int) -> Tensor:
    """A mask (B, T) of ones whose second row ends in a third of zeros."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, length - length // 3 :] = 0
    return mask


def flow_time() -> Tensor:
    """Times between 0 and 1, another one for each sample of the batch."""
    return torch.tensor([0.7, 0.3])


def step_time() -> Tensor:
    """The same among a thousand steps."""
    return 1000 * flow_time()


def positions(*grid: int, axes: int = 3) -> Tensor:
    """The place of every token of a grid (S, axes); axes the grid lacks are 0 and come first."""
    coordinates = torch.cartesian_prod(*(torch.arange(size) for size in grid)).reshape(math.prod(grid), len(grid))
    return torch.cat([torch.zeros(len(coordinates), axes - len(grid), dtype=torch.long), coordinates], dim=1).float()


def angles(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """A rotary table, cosines and sines (S, width), of neighbouring channels that turn together."""
    turned = torch.outer(torch.arange(tokens) * 0.7, 100.0 ** -torch.linspace(0, 1, width // 2))
    turned = turned.repeat_interleave(2, dim=1)
    return turned.cos(), turned.sin()
