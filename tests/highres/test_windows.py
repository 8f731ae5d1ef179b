"""Windows cover the latent, blend to one, and are the same on every rank."""

from __future__ import annotations

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.strategies.structure.sizing import starts_of
from patchpar.strategies.structure.windows import Tiling

SIZES = [(128, 128), (128, 192), (200, 136), (64, 256), (100, 130)]
NATIVE = (64, 64)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_a_constant_comes_back(size: tuple[int, int], overlap: float) -> None:
    """In every step the weights of all windows add up to 1 everywhere: nothing is left out, nothing counts twice."""
    for step in range(4):
        windows = Tiling(overlap=overlap).lay(size, NATIVE, key=f"0 {step}", unit=2)
        canvas = torch.zeros(1, 1, *size)
        for number in range(len(windows)):
            windows.cut(canvas, number).add_(windows.weight(number))
        assert torch.allclose(canvas, torch.ones_like(canvas), atol=1e-6)


def test_inner_windows_move_by_step_and_seed_only() -> None:
    lay = Tiling().lay
    first = lay((128, 128), NATIVE, key="0 1", unit=2)
    assert first.corners == lay((128, 128), NATIVE, key="0 1", unit=2).corners
    assert first.corners != lay((128, 128), NATIVE, key="0 2", unit=2).corners
    assert first.corners != lay((128, 128), NATIVE, key="1 1", unit=2).corners
    assert Tiling(moved=False).lay((128, 128), NATIVE, key="0 1").corners[4] == (32, 32)
    for step in range(20):
        corners = lay((128, 128), NATIVE, key=f"0 {step}", unit=2).corners
        assert {corners[0], corners[2], corners[6], corners[8]} == {(0, 0), (0, 64), (64, 0), (64, 64)}
        assert all(0 <= top <= 64 and 0 <= left <= 64 and top % 2 == left % 2 == 0 for top, left in corners)


@pytest.mark.parametrize(
    ("side", "overlap", "starts"),
    [
        (128, 0.5, [0, 32, 64]),
        (256, 0.5, [0, 32, 64, 96, 128, 160, 192]),
        (128, 0.0, [0, 64]),
        (64, 0.5, [0]),
        (96, 0.5, [0, 32]),
        (100, 0.5, [0, 18, 36]),
    ],
)
def test_windows_are_laid_evenly(side: int, overlap: float, starts: list[int]) -> None:
    """2 s - 1 along a side that is s times native, with an overlap of one half."""
    assert starts_of(side, 64, overlap, 1) == starts


def test_columns_that_hold_windows() -> None:
    windows = Tiling(moved=False).lay((128, 128), NATIVE, key="")
    assert windows.columns([0, 1]) == slice(0, 96)
    assert windows.columns([4, 8]) == slice(32, 128)


def test_a_side_off_the_grid_is_refused() -> None:
    with pytest.raises(PlanError, match="127 x 128 has a side that is no multiple of 2"):
        Tiling().lay((127, 128), NATIVE, key="", unit=2)
