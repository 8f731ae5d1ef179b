"""What tests compare with: a result that is no result at all is never close, and never far either."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tensors import noise, psnr_db, relative

WANT = noise(4, 6)
BOTH = pytest.mark.parametrize("measure", [relative, psnr_db])


def test_what_is_measured() -> None:
    assert relative(WANT, WANT) == 0
    assert psnr_db(WANT, WANT) == math.inf
    assert relative(1.5 * WANT, WANT) == pytest.approx(0.5)
    assert psnr_db(WANT + 0.1 * (WANT.max() - WANT.min()), WANT) == pytest.approx(20, abs=1e-3)


@BOTH
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite(measure: Callable[[Tensor, Tensor], float], number: float) -> None:
    got = WANT.clone()
    got[2, 3] = number
    with pytest.raises(AssertionError, match="not finite"):
        measure(got, WANT)
    with pytest.raises(AssertionError, match="not finite"):
        measure(got, got)


@BOTH
def test_another_shape(measure: Callable[[Tensor, Tensor], float]) -> None:
    with pytest.raises(AssertionError, match=r"\(1, 6\) is compared with \(4, 6\)"):
        measure(WANT[:1], WANT)


def test_nothing_is_far_from_zeros() -> None:
    with pytest.raises(AssertionError, match="zeros says nothing"):
        relative(torch.zeros(3), torch.zeros(3))
