"""Every class of UNet in bands predicts what it predicts whole, within rounding; without the exchange it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exact import denoisers

ON_RANKS = "tests.exact.on_ranks"
LIMIT, CONTROL = 1e-5, 1e-2


def sizes_for(name: str, world: int) -> list[tuple[int, int]]:
    """Even bands; bands of different size; and, where the denoiser takes them, sizes that are no multiple of anything.

    The total stride of all of them is 4 or less.
    """
    even, uneven = (4 * world, 8), (4 * world + 4, 12)
    return [even, uneven, (4 * world + 3, 9)] if denoisers.KINDS[name].odd else [even, uneven]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", denoisers.KINDS)
def test_in_bands_of_rows(ranks: Any, name: str, world: int) -> None:
    for found in ranks.run(f"{ON_RANKS}:parity", world, name, sizes_for(name, world)):
        assert max(errors.split for errors in found) <= LIMIT, found
        assert min(errors.alone for errors in found) >= CONTROL, found


@pytest.mark.parametrize("name", denoisers.KINDS)
def test_in_bands_of_columns(ranks: Any, name: str) -> None:
    sizes = [(width, height) for height, width in sizes_for(name, 3)]
    for found in ranks.run(f"{ON_RANKS}:parity", 3, name, sizes):
        assert max(errors.split for errors in found) <= LIMIT, found
        assert min(errors.alone for errors in found) >= CONTROL, found
