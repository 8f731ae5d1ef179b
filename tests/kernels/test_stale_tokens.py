"""The kernels of stale keys and values: the values of their eager twins, and nothing written beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.shard.kernels.correct_matrices import correct_matrices_eager, launch_correct_matrices
from patchpar.shard.kernels.correct_tokens import (
    RunOfRanks,
    correct_tokens_eager,
    extrapolate_tokens_eager,
    launch_correct_tokens,
    launch_extrapolate_tokens,
    table_of,
)
from patchpar.shard.kernels.fit_matrices import center_tokens_eager, launch_center_tokens
from patchpar.shard.kernels.fit_tokens import (
    empty_fit,
    fit_tokens_eager,
    launch_fit_tokens,
    launch_sample_tokens,
    sample_tokens_eager,
)
from patchpar.shard.kernels.write_tokens import launch_write_tokens, write_tokens_eager
from tests.breadth import first_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(
    write: Callable[..., None], key: Tensor, value: Tensor, common: int, start: int, common_start: int
) -> list[Tensor]:
    """The buffer and the message, where everything else was NaN."""
    batch, tokens, heads, width = key.shape
    attended, message = (
        torch.full((size, 2, batch, heads, width), torch.nan, dtype=key.dtype) for size in (40, tokens - common)
    )
    write(attended, key, value, start, common, message, common_start)
    return [attended, message]


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[-1]))
@pytest.mark.parametrize(("common", "start", "first"), [(0, 0, 0), (0, 9, 0), (5, 5, 0), (5, 12, 0), (5, 20, 8)])
def test_tokens_are_copied(
    interpreted: Callable[..., Any], dtype: torch.dtype, common: int, start: int, first: int
) -> None:
    """Of keys and values as projections leave them, one after the other in memory or with heads first."""
    for width in (8, 40):
        key = noise(0, 2, common + 13, 3, width, dtype=dtype)
        value = noise(1, 2, 3, common + 13, width, dtype=dtype).transpose(1, 2)
        args = (key, value, common, start, first)
        found, twin = interpreted(written, launch_write_tokens, *args), written(write_tokens_eager, *args)
        torch.testing.assert_close(found, twin, rtol=0, atol=0, equal_nan=True)
        assert found[0].isnan().any(), "other ranks' tokens are left alone"
        assert torch.equal(found[0][first : first + common, 0], key[:, :common].transpose(0, 1))
        assert torch.equal(found[1][:, 1], value[:, common:].transpose(0, 1))


def test_tokens_of_any_layout_are_copied(interpreted: Callable[..., Any]) -> None:
    """Also of keys whose numbers of a head do not follow one another in memory: as a convolution's channels are."""
    key, value = noise(0, 2, 3, 8, 18).permute(0, 3, 1, 2), noise(1, 2, 18, 3, 16)[..., ::2]
    found = interpreted(written, launch_write_tokens, key, value, 5, 12, 0)
    torch.testing.assert_close(found, written(write_tokens_eager, key, value, 5, 12, 0), rtol=0, atol=0, equal_nan=True)


def fit(
    fit_tokens: Callable[..., None],
    now: Tensor,
    past: list[Tensor],
    stride: int,
    ratio: float,
    along: Tensor | None = None,
) -> list[Tensor]:
    """The fit, and the samples afterwards, and how far tokens went, if an owner extrapolates."""
    past, along = [x.clone() for x in past], None if along is None else along.clone()
    given = [*past, *[None] * (4 - len(past))]
    into = empty_fit(now)
    fit_tokens(into, now, *given, along, torch.tensor(ratio), stride)
    return [into, *past, *([] if along is None else [along])]


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[-1]))
@pytest.mark.parametrize("extrapolates", first_of([True, False], True))
def test_fits_equal_those_of_the_twin(interpreted: Callable[..., Any], dtype: torch.dtype, extrapolates: bool) -> None:
    for tokens, stride, width in ((37, 1, 8), (150, 3, 40)):
        whole = [noise(seed, tokens, 4, 3, width) + 2 for seed in (0, 1)]
        now, before = whole[0] + 0.3 * noise(2, *whole[0].shape), whole[0] - 0.2 * whole[1]
        steps = [x.to(dtype) for x in (now, whole[0], before)]
        past = [y for x in steps[1:] for y in (x.mean(0, dtype=torch.float32), x[::stride].contiguous())]
        args = (steps[0], past if extrapolates else past[:2], stride, 0.7)
        found, twin = interpreted(fit, launch_fit_tokens, *args), fit(fit_tokens_eager, *args)
        for got, want in zip(found, twin, strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])
        assert torch.equal(found[2], steps[0][::stride]), "samples are of this step afterwards"
        assert not extrapolates or torch.equal(found[4], past[1])


def sampled(sample_tokens: Callable[..., None], now: Tensor, past: list[Tensor], *args: Any) -> list[Tensor]:
    """The samples afterwards."""
    past = [x.clone() for x in past]
    sample_tokens(now, *past, *[None] * (4 - len(past)), *args)
    return past


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[-1]))
@pytest.mark.parametrize("continues", first_of([True, False], True))
def test_samples_equal_those_of_the_twin(interpreted: Callable[..., Any], dtype: torch.dtype, continues: bool) -> None:
    for tokens, stride, width in ((37, 1, 8), (150, 3, 40)):
        now, last = (noise(seed, tokens, 4, 3, width, dtype=dtype) + 2 for seed in (0, 1))
        seen, unknown = last[::stride].contiguous(), torch.full_like(last[::stride], torch.nan)
        past = [last.mean(0, dtype=torch.float32), seen, unknown[0].float(), unknown]
        for given in (past, past[:2]):
            args = (now, given, stride, continues)
            found, twin = interpreted(sampled, launch_sample_tokens, *args), sampled(sample_tokens_eager, *args)
            for got, want in zip(found, twin, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert torch.equal(found[1], now[::stride])
        before = interpreted(sampled, launch_sample_tokens, now, past, stride, continues)[3]
        assert torch.equal(before, seen if continues else now[::stride])


def means(*steps: Tensor) -> list[Tensor]:
    """Mean and all tokens of each step."""
    return [y for x in steps for y in (x.mean(0, dtype=torch.float32), x)]


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[-1]))
@pytest.mark.parametrize("extrapolates", first_of([True, False], True))
def test_all_tokens_may_be_kept(interpreted: Callable[..., Any], dtype: torch.dtype, extrapolates: bool) -> None:
    """Samples of the last step are read among them; then all of them are this step's, and the last ones those before.

    If they are extrapolated, by their owner: as far as they went in the last step.
    """
    for tokens, stride, width in ((37, 1, 8), (151, 3, 40), (5, 4, 8)):
        last, moved, other = (noise(seed, tokens, 4, 3, width) + 2 for seed in range(3))
        steps = [x.to(dtype) for x in (last + 0.3 * moved, last, last - 0.2 * moved - 0.1 * other)]
        along = 0.7 + 0.3 * torch.rand(4, 3, generator=torch.Generator().manual_seed(3))
        past = means(*steps[1 : 3 if extrapolates else 2])
        args = (steps[0], past, stride, 0.7, along.to(dtype).float() if extrapolates else None)
        found, twin = interpreted(fit, launch_fit_tokens, *args), fit(fit_tokens_eager, *args)
        for got, want in zip(found, twin, strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])
        assert torch.equal(found[2], steps[0])
        assert not extrapolates or torch.equal(found[4], steps[1])
        assert not extrapolates or torch.equal(found[0][..., 0], along.to(dtype)), "what others hold is along this much"
        assert not extrapolates or not torch.equal(found[5], along)


@pytest.mark.parametrize("continues", first_of([True, False], True))
def test_samples_of_an_exact_step_may_be_all_tokens(interpreted: Callable[..., Any], continues: bool) -> None:
    for tokens, stride, width in ((37, 1, 8), (151, 3, 40)):
        now, last, unknown = (noise(seed, tokens, 4, 3, width) for seed in range(3))
        past = means(last, unknown)
        for given in (past, past[:2]):
            args = (now, given, stride, continues)
            found, twin = interpreted(sampled, launch_sample_tokens, *args), sampled(sample_tokens_eager, *args)
            torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-5)
            assert torch.equal(found[1], now)
            assert len(found) == 2 or torch.equal(found[3], last if continues else now)


def extrapolated(extrapolate: Callable[..., None], newest: Tensor, previous: Tensor, along: Tensor | None) -> Tensor:
    """The tokens, and one more that stays as it is."""
    into = torch.full((len(newest) + 1, *newest.shape[1:]), torch.nan, dtype=newest.dtype)
    extrapolate(into[:-1], newest, previous, along, torch.tensor(0.7))
    return into


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[-1]))
@pytest.mark.parametrize("has_along", [True, False])
def test_tokens_are_extrapolated(interpreted: Callable[..., Any], dtype: torch.dtype, has_along: bool) -> None:
    newest, previous = (noise(seed, 37, 4, 3, 40, dtype=dtype) for seed in (0, 1))
    along = torch.rand(4, 3, generator=torch.Generator().manual_seed(2)) if has_along else None
    args = (newest, previous, along)
    found = interpreted(extrapolated, launch_extrapolate_tokens, *args)
    reach = 0.7 if along is None else 0.7 * along.unsqueeze(-1)
    want = newest.float() + reach * (newest.float() - previous.float())
    for each in (found, extrapolated(extrapolate_tokens_eager, *args)):
        torch.testing.assert_close(each[:37].float(), want, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        assert each[37:].isnan().all()


def centred(
    center: Callable[..., tuple[Tensor, Tensor]], now: Tensor, past: list[Tensor], ratio: float, along: Tensor | None
) -> list[Tensor]:
    """What a fit with matrices reads, and the samples afterwards, and how far tokens went."""
    past, along = [x.clone() for x in past], None if along is None else along.clone()
    given = [*past, *[None] * (4 - len(past))]
    return [*center(now, *given, along, torch.tensor(ratio)), *past, *([] if along is None else [along])]


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[-1]))
@pytest.mark.parametrize(("extrapolates", "beforehand"), first_of([(True, True), (True, False), (False, False)]))
def test_what_matrices_are_fitted_to_equals_that_of_the_twin(
    interpreted: Callable[..., Any], dtype: torch.dtype, extrapolates: bool, beforehand: bool
) -> None:
    for tokens, width in ((37, 8), (151, 40)):
        last, moved, other = (noise(seed, tokens, 4, 3, width) + 2 for seed in range(3))
        steps = [x.to(dtype) for x in (last + 0.3 * moved, last, last - 0.2 * moved - 0.1 * other)]
        along = (0.7 + 0.3 * torch.rand(4, 3, generator=torch.Generator().manual_seed(3))).to(dtype).float()
        args = (steps[0], means(*steps[1 : 3 if extrapolates else 2]), 0.7, along if beforehand else None)
        found, twin = interpreted(centred, launch_center_tokens, *args), centred(center_tokens_eager, *args)
        for got, want in zip(found, twin, strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])
        assert torch.equal(found[3], steps[0])
        assert not extrapolates or torch.equal(found[5], steps[1])
        assert not beforehand or torch.equal(found[1][..., 0], along)
        assert float(found[0].mean(2).abs().max()) < 1e-2, "centred"


def test_a_fit_of_nothing_is_nothing(interpreted: Callable[..., Any]) -> None:
    same = torch.full((20, 2, 1, 8), 300.0, dtype=torch.float16)
    past = [same.mean(0, dtype=torch.float32), same.clone()]
    packed = interpreted(fit, launch_fit_tokens, same, [*past, *past], 1, 1.0)[0]
    assert torch.equal(packed[..., 1:], torch.zeros(2, 1, 16, dtype=torch.float16))
    assert torch.equal(packed[..., 0], torch.full((2, 1), 0.5, dtype=torch.float16))


def corrected(correct: Callable[..., None], tokens: list[Tensor | None], fits: Tensor | None, ratio: float) -> Any:
    """What attention reads, and tokens of both steps, afterwards, on rank 2 of four with 3, 5, 6 and 5 tokens."""
    newest, previous = (None if x is None else x.clone() for x in tokens)
    assert newest is not None
    attended = torch.full((2 + 3 + 5 + 6 + 5, *newest.shape[1:]), torch.nan, dtype=newest.dtype)
    runs = [RunOfRanks(0, 1, 3, 2, 0, 0), RunOfRanks(1, 1, 5, 5, 3, 3), RunOfRanks(3, 1, 5, 16, 8, 8)]
    flat = [number for run in runs for number in run]
    correct(attended, newest, previous, fits, torch.tensor(ratio), table_of(runs), flat)
    return [attended, newest, previous]


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[-1]))
@pytest.mark.parametrize("extrapolates", [True, False])
@pytest.mark.parametrize("corrects", [True, False])
def test_corrections_equal_those_of_the_twin(
    interpreted: Callable[..., Any], dtype: torch.dtype, extrapolates: bool, corrects: bool
) -> None:
    newest, previous = (noise(seed, 13, 4, 3, 8, dtype=dtype) for seed in (0, 1))
    args = ([newest, previous if extrapolates else None], noise(2, 4, 4, 3, 17, dtype=dtype) if corrects else None, 0.7)
    found, twin = interpreted(corrected, launch_correct_tokens, *args), corrected(correct_tokens_eager, *args)
    torch.testing.assert_close(found, twin, rtol=CLOSE[dtype], atol=CLOSE[dtype], equal_nan=True)
    assert found[0].isnan().all((1, 2, 3)).tolist() == [True] * 2 + [False] * 8 + [True] * 6 + [False] * 5
    assert torch.equal(found[1], newest)
    assert not extrapolates or torch.equal(found[2], newest)


@pytest.mark.parametrize("dtype", first_of(DTYPES[:2], DTYPES[1]))
@pytest.mark.parametrize("extrapolates", [True, False])
def test_corrections_by_matrices_equal_those_of_the_twin(
    interpreted: Callable[..., Any], dtype: torch.dtype, extrapolates: bool
) -> None:
    """Not in bfloat16, which Triton's interpreter takes for integers where it multiplies matrices."""
    for width in (8, 40):
        newest, previous = (noise(seed, 13, 4, 3, width, dtype=dtype) for seed in (0, 1))
        fits = noise(2, 4, 4, 3, 1 + width * width + width, dtype=dtype)
        args = ([newest, previous if extrapolates else None], fits, 0.7)
        found = interpreted(corrected, launch_correct_matrices, *args)
        want = corrected(
            correct_matrices_eager, [None if x is None else x.double() for x in args[0]], fits.double(), 0.7
        )
        for got, wanted in zip(found, want, strict=True):
            if wanted is not None:
                torch.testing.assert_close(got.double(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype], equal_nan=True)
        assert torch.equal(found[1], newest)
        assert not extrapolates or torch.equal(found[2], newest)
        assert float((found[0][2:5].double() - newest[:3].double()).abs().max()) > 1, "control"


def test_ranks_in_a_row_are_one_run() -> None:
    newest, fits = noise(0, 12, 4, 3, 8), noise(1, 4, 4, 3, 17)
    each = [RunOfRanks(rank, 1, 4, 4 * rank, 4 * rank, 0) for rank in (0, 1, 2)]
    found = []
    for runs in (each, [RunOfRanks(0, 3, 4, 0, 0, 0)]):
        found.append(torch.full_like(newest, torch.nan))
        table = table_of(runs)
        assert table[:, :4].tolist() == [[0, 4, 0, 0], [1, 4, 4, 4], [2, 4, 8, 8]]
        correct_tokens_eager(found[-1], newest, None, fits, torch.ones(()), table, [n for run in runs for n in run])
    assert torch.equal(*found)
