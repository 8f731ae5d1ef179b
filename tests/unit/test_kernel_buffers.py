"""Buffers of kernels that a recording counts are those that the process takes while a kernel runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import MetaMode
from patchpar.shard.sdpa import AttentionCall

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
KIB = 1024


def kib(name: str) -> int:
    """A line of the process's status."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


def taken(run: Callable[[], object]) -> int:
    """The most bytes that the process takes beyond what it had.

    The largest of three: memory of earlier tests that is given back meanwhile makes one smaller.
    """
    run()  # kernels are made
    gc.collect()
    return max(_taken_once(run) for _ in range(3))


def _taken_once(run: Callable[[], object]) -> int:
    RESET.write_text("5")  # the most memory so far is that of now
    before = kib("VmRSS")
    found = run()
    most = kib("VmHWM")
    del found
    return KIB * (most - before)


def recorded(layer: nn.Module, x: Tensor) -> LiveBytes:
    """What a recording counts."""
    memory, empty, without_values = LiveBytes(""), deepcopy(layer).to("meta"), x.to("meta")
    with torch.no_grad(), MetaMode(memory):
        found = empty(without_values)
    del found
    return memory


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 416, 416)),
        (nn.Conv2d(64, 3, 3, padding=1), (1, 64, 416, 416)),
        (nn.Conv2d(64, 64, 1), (1, 64, 416, 416)),
        (nn.Linear(64, 64), (173_056, 64)),
    ],
    ids=["convolution", "to-colours", "of-single-positions", "linear"],
)
def test_buffers_are_those_that_a_process_takes(layer: nn.Module, size: tuple[int, ...]) -> None:
    """Tensors here are so large (42 MiB) that the C library gives them back as soon as they are freed."""
    x = torch.randn(size)
    with torch.no_grad():
        most = taken(lambda: layer(x))
    counted = recorded(layer, x)
    working = counted.working[""]
    assert most * 0.97 <= working <= most * 1.1 + 8e6, (most, counted.peaks, working)


def test_maps_with_channels_last_are_not_copied() -> None:
    """Kernels read and write them as they are; the result has the same layout, also without values."""
    layer = nn.Conv2d(64, 64, 3, padding=1)
    x = torch.randn(1, 64, 416, 416).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        real = layer(x)
        most = taken(lambda: layer(x))
    counted = recorded(layer, x)
    assert most * 0.97 <= counted.working[""] <= most * 1.1 + 1e6, (most, counted.peaks)
    with torch.no_grad(), MetaMode(LiveBytes("")):
        assert deepcopy(layer).to("meta")(x.to("meta")).stride() == real.stride()


def test_attention_has_the_layout_of_torchs() -> None:
    """Of a query whose tokens have their heads side by side, as models make it, a view of the answer has so too."""
    for tokens_first in (True, False):
        qkv = [torch.randn(2, 16, 3, 8).transpose(1, 2) if tokens_first else torch.randn(2, 3, 16, 8) for _ in "qkv"]
        empty = MetaMode(LiveBytes("")).attend(AttentionCall(*(x.to("meta") for x in qkv)))
        assert empty.stride() == AttentionCall(*qkv).run().stride()


def test_buffers_count_while_a_kernel_runs_only() -> None:
    counted = recorded(nn.Conv2d(64, 64, 3, padding=1), torch.empty(1, 64, 32, 32))
    size, weight = 4 * 64 * 32 * 32, 4 * 64 * 64 * 9
    assert counted.peaks[""] == size
    assert counted.working[""] - size - weight == pytest.approx(size, abs=1024)  # its bias is among them
    assert counted.alive == 0
    counted.begin("next")
    assert counted.working["next"] == 0
