"""Calls of a model's denoiser with random values, and their operators, recorded without values."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from patchpar.models.dry_run.empty_pipeline import empty_pipeline
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import META, MetaMode
from patchpar.models.info import denoisers_of
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.models.task import ANY_PROMPT
from patchpar.pipeline.planner.empty_call import first_call
from patchpar.pipeline.planner.tape_recorder import ENCODE
from patchpar.plan.replay.tape import Operator

SPREAD = 0.02
"""Of random weights: values stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCall:
    """A call of a denoiser that can be made again and again, with its operators."""

    operators: tuple[Operator, ...]
    run: Callable[[], object]


class RandomDenoiser:
    """The first denoiser of a model folder with random weights on a device. No weight is read. Raises PlanError."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        silence_libraries()
        self._pipe = empty_pipeline(folder, {"torch_dtype": dtype})
        self._pipe.set_progress_bar_config(disable=True)
        self._empty = next(iter(denoisers_of(self._pipe).values()))
        self._device, self._real = device, _with_random_weights(self._empty, device)

    def call(self, size: int) -> RealCall:
        """Return its call for a square image of so many pixels on a side, made once already.

        Raises UnsupportedModel for a model that is never called.
        """
        call = {"prompt": ANY_PROMPT, "height": size, "width": size}
        found = first_call(self._pipe, self._empty, call, "it cannot be measured")
        operators = _operators(self._empty, found.args, found.kwargs)
        args, kwargs = tree_map(lambda x: _filled(x, self._device), (found.args, found.kwargs))
        run = torch.no_grad()(partial(self._real, *args, **kwargs))
        run()  # memory is allocated, kernels are chosen
        return RealCall(operators=operators, run=run)


def _with_random_weights(empty: nn.Module, device: torch.device) -> nn.Module:
    real = deepcopy(empty).to_empty(device=device)
    for weight in (*real.parameters(), *real.buffers()):
        if weight.is_floating_point():
            weight.data.normal_(0.0, SPREAD)
        else:
            weight.data.zero_()
    return real


def _operators(denoiser: nn.Module, args: Any, kwargs: Any) -> tuple[Operator, ...]:
    found: list[Operator] = []
    mode = MetaMode(LiveBytes(ENCODE), found.append)
    with torch.no_grad(), mode.functions(), mode:
        denoiser(*args, **kwargs)
    return tuple(found)


def _filled(x: Any, device: torch.device) -> Any:
    """Return a tensor, of any shape, with values on `device`; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    if x.device != META:
        return x.to(device)
    if x.is_floating_point():
        return torch.randn(x.shape, device=device).to(x.dtype)
    return torch.zeros(x.shape, dtype=x.dtype, device=device)
