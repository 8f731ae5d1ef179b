"""Parts that misbehave, in a module that workers can import."""

from __future__ import annotations

import os
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
