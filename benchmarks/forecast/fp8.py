"""Linears in FP8, as torchao's `float8_dynamic_activation_float8_weight` has them, of models without values.

Products of FP8 have twice the rate of half precision in the sheets of NVIDIA's Ada and Hopper devices, such as
https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.forecast.models import Model
from patchpar.plan.replay.machine import Machine

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
AS_FAST = 2
"""Times as half precision."""


class Fp8Linear(nn.Module):
    """A Linear whose weight is in FP8, and its input for the product, with a scale for all of it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.to(FP8), requires_grad=False)
        self.bias = linear.bias
        self.scale = nn.Parameter(linear.weight.new_empty((), dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with `x` [..., C], in its dtype."""
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax().float() / LARGEST
        quantized = (rows / scale).to(FP8)
        found = torch._scaled_mm(quantized, self.weight.t(), scale, self.scale, bias=self.bias, out_dtype=x.dtype)
        return found.reshape(*x.shape[:-1], found.shape[-1])


def in_fp8(model: Model) -> Model:
    """Return a model with all Linears of its denoiser in FP8."""

    def quantized() -> tuple[Any, dict[str, Any]]:
        pipe, call = model()
        for owner in list(pipe.transformer.modules()):
            for name, part in owner.named_children():
                if isinstance(part, nn.Linear):
                    setattr(owner, name, Fp8Linear(part))
        return pipe, call

    return quantized


def with_fp8(machine: Machine) -> Machine:
    """Return a machine of the catalogue whose device has a rate for FP8."""
    flops = machine.device.flops
    rate = AS_FAST * flops["bfloat16"]
    return replace(machine, device=replace(machine.device, flops={**flops, str(FP8).removeprefix("torch."): rate}))
