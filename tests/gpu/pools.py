"""Workers on GPUs that run a function, and what its errors may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from patchpar.launch.local import LocalExecutor
from tests.gpu.on_ranks import GpuErrors

ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def on_ranks(devices: Sequence[str], function: str, *args: Any) -> list[Any]:
    with started(devices) as pool:
        return pool.call("run", function, len(devices), "auto", args)


def started(devices: Sequence[str]) -> LocalExecutor:
    return LocalExecutor(devices, "tests.ranks:Ranks", deadline=120.0, preload=["tests.tiny"])


def check(found: Sequence[GpuErrors], dtype: torch.dtype) -> None:
    for errors in found:
        assert errors.split <= max(ROUNDING[dtype] / 10, 2 * errors.whole)
        assert errors.alone > 10 * errors.split, "without exchange the result is another one"
