"""Random weights under which every exchange matters.

A freshly constructed net hides mistakes: attention is close to uniform, output projections of ControlNets and temporal
layers are zero, norms have no scale of their own. Here each of them gets work to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_QUERY_KEY_GAIN = 2.5
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@contextmanager
def seeded() -> Iterator[None]:
    """What is built here has the same weights in every process. The caller's random state is left as it was.

    Some models leave parameters uninitialised: such memory is filled with NaN here, which `enliven` replaces.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)


def enliven(model: nn.Module) -> nn.Module:
    """Make attention selective, norms uneven, zero-initialised projections alive and NaN a number. In place.

    Returns the model.
    """
    for name, module in model.named_modules():
        if isinstance(module, _NORMS) or "RMSNorm" in type(module).__name__:
            _unsettle(module)
        if hasattr(module, "to_q") and hasattr(module, "to_k"):
            _sharpen(module)
        if "alpha_blender" in name or hasattr(module, "mix_factor"):
            _blend_both(module)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
        elif not torch.isfinite(parameter).all():
            nn.init.normal_(parameter, std=0.1)
    return model


def _unsettle(norm: nn.Module) -> None:
    with torch.no_grad():
        if getattr(norm, "weight", None) is not None:
            norm.weight.add_(0.2 * torch.randn_like(norm.weight))
        if getattr(norm, "bias", None) is not None:
            norm.bias.add_(0.2 * torch.randn_like(norm.bias))


def _sharpen(attention: nn.Module) -> None:
    """Scores with a standard deviation of about two, so that which keys are seen decides the result."""
    normed = getattr(attention, "norm_q", None) is not None
    pair = (attention.norm_q, attention.norm_k) if normed else (attention.to_q, attention.to_k)
    gain = math.sqrt(2) if normed else _QUERY_KEY_GAIN
    with torch.no_grad():
        for layer in pair:
            if getattr(layer, "weight", None) is not None:
                layer.weight.mul_(gain)


def _blend_both(blender: nn.Module) -> None:
    with torch.no_grad():
        if isinstance(getattr(blender, "mix_factor", None), nn.Parameter):
            blender.mix_factor.fill_(0.3)
