"""Every class of UNet in bands predicts what it predicts whole, within rounding; without the exchange it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.strategies.exact import ExactPatch
from tests.breadth import first_of
from tests.exact import denoisers

QUICK = ("sdxl", "controlnet", "asymmetric")
ON_RANKS = "tests.exact.on_ranks"
LIMIT, CONTROL = 1e-5, 1e-2


def odd_size(name: str, world: int) -> tuple[int, int]:
    """Bands of different size, and where the denoiser takes it a size that is no multiple of anything.

    The total stride of all of them is 4 or less.
    """
    return (4 * world + 3, 9) if denoisers.KINDS[name].odd else (4 * world + 4, 12)


def check(found: list[Any]) -> None:
    assert max(errors.split for errors in found) <= LIMIT, found
    assert min(errors.alone for errors in found) >= CONTROL, found


@pytest.mark.parametrize("name", first_of(denoisers.KINDS, *QUICK))
def test_two_bands_of_rows(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:parity", 2, name, [(8, 8), (12, 8), odd_size(name, 2)]):
        check(found)


@pytest.mark.parametrize("name", first_of(denoisers.KINDS, "freeu_sdxl"))
def test_three_bands_of_columns(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:parity", 3, name, [odd_size(name, 3)[::-1]]):
        check(found)


@pytest.mark.parametrize("name", first_of(denoisers.KINDS, "sdxl"))
def test_four_bands_of_rows(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:parity", 4, name, [odd_size(name, 4)]):
        check(found)


def test_halos_joined_as_on_gpus_keep_channels_last(ranks: Any) -> None:
    for error, formats in ranks.run(f"{ON_RANKS}:channels_last_with_joined_halos", 2, "sdxl"):
        assert error <= LIMIT
        assert "lost" not in formats, formats
        assert formats.count("kept") > 10, formats


def test_bands_of_the_shorter_side_when_asked(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:parity", 2, "sd", [(16, 8)], "columns"):
        check(found)


def test_rows_and_columns_by_turns(ranks: Any) -> None:
    """The longer side is split, so that the seams change with the size."""
    for found in ranks.run(f"{ON_RANKS}:parity", 2, "sdxl", [(16, 8), (8, 16), (16, 12)]):
        check(found)


WAYS = (
    ExactPatch(overlap=False),
    ExactPatch(attention="ring"),
    ExactPatch(attention="two-way-ring"),
    ExactPatch(attention="token-ring"),
    ExactPatch(ulysses=2),
    ExactPatch(attention="ring", ulysses=2),
    ExactPatch(attention="token-ring", ulysses=2),
)


@pytest.mark.parametrize("strategy", first_of(WAYS, WAYS[4]), ids=str)
@pytest.mark.parametrize("name", first_of(["sdxl", "sd"], "sdxl"))
def test_other_ways_to_meet_everybodys_keys(ranks: Any, name: str, strategy: ExactPatch) -> None:
    for found in ranks.run(f"{ON_RANKS}:parity", 4, name, [odd_size(name, 4), (16, 8)], "auto", strategy):
        check(found)


def test_through_torch_distributed(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:parity", 3, "sdxl", [(15, 9)], through="torch"):
        check(found)


@pytest.mark.parametrize("dtype", first_of([torch.float16, torch.bfloat16], torch.bfloat16))
@pytest.mark.parametrize("name", first_of(["sdxl", "svd"], "sdxl"))
def test_in_half_precision_bands_add_no_error_of_their_own(ranks: Any, name: str, dtype: torch.dtype) -> None:
    for errors in ranks.run(f"{ON_RANKS}:in_half_precision", 3, name, dtype):
        assert errors.split <= 1.2 * errors.alone, errors


@pytest.mark.parametrize("name", first_of(["sdxl", "svd", "freeu"]))
def test_in_double_precision_the_error_is_that_of_double_precision(ranks: Any, tmp_path: Path, name: str) -> None:
    for errors in ranks.run(f"{ON_RANKS}:in_double_precision", 3, name, str(tmp_path)):
        assert errors.split <= 1e-13, errors
        assert errors.alone >= CONTROL, errors


@pytest.mark.parametrize(
    ("name", "when"), first_of([("sdxl", "before"), ("sd", "before"), ("sd", "after")], ("sdxl", "before"))
)
def test_weights_that_are_kept_in_eight_bits(ranks: Any, tmp_path: Path, name: str, when: str) -> None:
    for errors in ranks.run(f"{ON_RANKS}:with_weights_in", 2, name, torch.float8_e4m3fn, when, str(tmp_path)):
        assert errors.split <= LIMIT, errors
        assert errors.alone >= CONTROL, errors
