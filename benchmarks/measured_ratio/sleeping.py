"""A layer of a UNet that sleeps in proportion to its rows, longer in one process: a device of another speed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn


class SleepingSiLU(nn.SiLU):
    """Sleeps `seconds` for `rows` rows, `slowness` times as long in the process whose number is in the file `slow`."""

    def __init__(self, seconds: float, rows: int, slowness: float, slow: Path) -> None:
        super().__init__()
        self.seconds, self.rows, self.slowness, self.slow = seconds, rows, slowness, slow

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated map [B, C, h, W]."""
        is_slow = self.slow.read_text() == str(os.getpid())
        time.sleep(self.seconds * x.shape[-2] / self.rows * (self.slowness if is_slow else 1.0))
        return super().forward(x)


def let_sleep(pipe: Any, seconds: float, size: int, slowness: float, slow: Path) -> Any:
    """Return the pipeline, whose UNet sleeps in its last activation for an image of `size` rows."""
    pipe.unet.conv_act = SleepingSiLU(seconds, size // pipe.vae_scale_factor, slowness, slow)
    return pipe
