"""Parts that misbehave, in a module that workers can import."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler
from diffusers.callbacks import PipelineCallback


class MixesRows(torch.nn.Module):
    """Around a block of a UNet: subtracts the mean over the rows, which no band knows."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self.block(*args, **kwargs)
        return x - 0.5 * x.mean(-2, keepdim=True)


class RaisesOnOneRank(PipelineCallback):
    """Raises in the worker with a given process id only."""

    tensor_inputs = ("latents",)

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> Any:
        if os.getpid() == self.pid:
            raise ZeroDivisionError("this rank had enough")
        return callback_kwargs


class NeverSteps(EulerDiscreteScheduler):
    """Raises at its first step, on every rank."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("no step is small enough")


class NotesItsCallers(torch.nn.Module):
    """Around a layer of a denoiser: writes down which files its latest call came through, one line each."""

    def __init__(self, layer: torch.nn.Module, path: Path) -> None:
        super().__init__()
        self.layer, self.path = layer, path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.path.write_text("\n".join(frame.filename for frame in traceback.extract_stack()))
        return self.layer(*args, **kwargs)


class DiesAt:
    """A hook before a layer: sends its process a signal when a file says so, and only once.

    The file has a process id, the number of a call, a layer and the signal's name.
    """

    def __init__(self, layer: str, orders: Path) -> None:
        self.layer, self.orders, self.calls = layer, orders, 0

    def __call__(self, module: Any, inputs: Any) -> None:
        order = self.orders.read_text().split()
        if not order or order[0] != str(os.getpid()) or order[2] != self.layer:
            self.calls = 0
            return
        self.calls += 1
        if self.calls >= int(order[1]):
            self.orders.write_text("")
            os.kill(os.getpid(), signal.Signals[order[3]])


class LacksMemory(torch.nn.Module):
    """Around a layer: raises torch's error for inputs of more elements than a file says."""

    def __init__(self, layer: torch.nn.Module, room: Path) -> None:
        super().__init__()
        self.layer, self.room = layer, room

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel() > int(self.room.read_text()):
            raise torch.OutOfMemoryError(f"{x.numel()} elements do not fit")
        return self.layer(x, *args, **kwargs)
