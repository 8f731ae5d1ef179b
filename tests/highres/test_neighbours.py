"""What a window sees beyond its border: everything within reach, of one other window each, and nothing of itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from patchpar.strategies.structure.sizing import fewest_of
from patchpar.strategies.structure.windows import Tiling, WindowNeighbours, Windows

SIZE, NATIVE = (24, 16), (8, 8)
TILINGS = {
    "touching": Tiling(margin=0.0, moved=False),
    "grown": Tiling(margin=0.25, moved=False),
    "overlapping": Tiling(overlap=0.5, moved=False),
}


def seen_by(windows: Windows, receiver: int, reach: int, stride: int = 1) -> torch.Tensor:
    """How often each place of the whole is seen by a window beside its own."""
    found = WindowNeighbours(windows, (reach, reach))
    times = torch.zeros(tuple(side // stride for side in windows.size), dtype=torch.int64)
    columns = found.tokens(stride)[1]
    for sender in range(len(windows)):
        top, left = (corner // stride for corner in windows.corners[sender])
        for token in found.seen(sender, receiver, stride).tolist() if sender != receiver else ():
            times[top + token // columns, left + token % columns] += 1
    return times


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", TILINGS)
def test_all_within_reach_once(name: str, stride: int) -> None:
    windows = TILINGS[name].lay(SIZE, NATIVE, key="", unit=stride, step=2)
    for receiver in range(len(windows)):
        (top, left), (height, width) = windows.corners[receiver], windows.window
        want = torch.zeros(SIZE, dtype=torch.int64)
        want[max(0, top - 4) : top + height + 4, max(0, left - 4) : left + width + 4] = 1
        want[top : top + height, left : left + width] = 0
        assert torch.equal(seen_by(windows, receiver, 4, stride), want[::stride, ::stride])


def test_without_reach_nothing_is_seen() -> None:
    windows = TILINGS["touching"].lay(SIZE, NATIVE, key="")
    assert all(not seen_by(windows, receiver, 0).any() for receiver in range(len(windows)))


@pytest.mark.parametrize(
    ("side", "native", "margin"), [(16, 8, 0.0), (24, 8, 0.25), (20, 8, 0.0), (8, 8, 0.5), (6, 8, 0.0)]
)
def test_fewest_windows_cover_a_side(side: int, native: int, margin: float) -> None:
    """As many as native ones that touch, each larger by the margin, the last at the end."""
    window, starts = fewest_of(side, native, margin, 1, 1)
    assert len(starts) == -(-side // native)
    assert window == min(side, native + native * margin)
    assert starts[0] == 0
    assert starts[-1] + window == side
    assert all(after - before <= window for before, after in pairwise(starts))
