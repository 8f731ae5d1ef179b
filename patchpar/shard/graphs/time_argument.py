"""A timestep that a scheduler gives as a number, as the tensor that the network would make of it.

Each number would be a kind of step of its own, and a tensor that is made of it a copy from the host, which no graph
repeats.
"""

import inspect
from typing import Any

import torch
from torch import nn

from patchpar.shard.stale.extrapolation import TIMES

OF_CONDITIONED = torch.float64, torch.int64
MADE_OF_NUMBERS = {
    "UNet2DConditionModel": OF_CONDITIONED,
    "UNet3DConditionModel": OF_CONDITIONED,
    "UNetMotionModel": OF_CONDITIONED,
    "UNetSpatioTemporalConditionModel": OF_CONDITIONED,
    "I2VGenXLUNet": OF_CONDITIONED,
    "Kandinsky3UNet": (torch.float32, torch.int32),
    "UNet2DModel": (torch.int64, torch.int64),
    "PriorTransformer": (torch.int64, torch.int64),
}
"""diffusers' networks that make a tensor of a timestep which is a number, and of which dtype: of floats, of integers.

They use it in no other way. Of all others a number may decide what is computed.
"""


class TimeArgument:
    """Where a network has its timestep."""

    def __init__(self, network: nn.Module) -> None:
        kind = type(network)
        is_known = kind.__module__.startswith("diffusers.") and kind.__name__ in MADE_OF_NUMBERS
        names = tuple(inspect.signature(kind.forward).parameters)[1:]
        self._dtypes = MADE_OF_NUMBERS[kind.__name__] if is_known else None
        self._name = next((name for name in TIMES if name in names), "")
        self._position = names.index(self._name) if self._name else 0

    def as_tensor(self, call: tuple[Any, Any], device: torch.device) -> tuple[Any, Any]:
        """Return a call, args and kwargs, with a number in its place as a tensor []."""
        args, kwargs = call
        if self._dtypes is None or not self._name:
            return call
        value = kwargs.get(self._name, args[self._position] if self._position < len(args) else None)
        if type(value) not in (float, int):
            return call
        time = torch.full((), value, dtype=self._dtypes[isinstance(value, int)], device=device)
        if self._name in kwargs:
            return args, {**kwargs, self._name: time}
        return (*args[: self._position], time, *args[self._position + 1 :]), kwargs
