"""A loop of diffusers goes on with predictions that come band by band, and ends with the bits of a plain loop."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from patchpar.comm.banded_tensor import BandedTensor
from tests.breadth import first_of

SIZES, ROWS, STEPS = (4, 4, 5, 3), 16, 6
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
SCHEDULERS = (
    *("FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler", "DDIMScheduler", "FlowMatchHeunDiscreteScheduler"),
    *("EulerAncestralDiscreteScheduler", "DDPMScheduler", "PNDMScheduler", "LCMScheduler"),
    *("HeunDiscreteScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "TCDScheduler"),
    *("UniPCMultistepScheduler", "DEISMultistepScheduler", "CogVideoXDPMScheduler", "SASolverScheduler"),
)
WITHOUT_WAITING = ("FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler", "DDIMScheduler")


class Net:
    """A denoiser that computes every pixel alone, band by band if told. `asked`: bands in the order of computation."""

    def __init__(self, *, banded: bool) -> None:
        self.banded, self.asked = banded, list[tuple[int, int]]()
        self._calls = 0

    def __call__(self, x: Tensor, t: Any) -> Tensor:
        number, self._calls = self._calls, self._calls + 1

        def computed(part: Tensor) -> Tensor:
            return torch.einsum("oc,bchw->bohw", WEIGHT, torch.tanh(part)) * (0.3 + 0.0001 * float(t))

        if not self.banded:
            starts = [sum(SIZES[:band]) for band in range(len(SIZES))]
            return torch.cat([computed(x.narrow(-2, a, n)) for a, n in zip(starts, SIZES, strict=True)], -2)

        def fetch(band: int) -> Tensor:
            self.asked.append((number, band))
            part = x.band(band) if isinstance(x, BandedTensor) else x.split(SIZES, -2)[band]
            return computed(part)

        return BandedTensor.of(torch.full(x.shape, torch.nan), -2, SIZES, fetch)


def looped(name: str, net: Net) -> Tensor:
    """The latents [1, 4, 16, 12] after a loop with guidance."""
    scheduler = getattr(diffusers, name)()
    scheduler.set_timesteps(STEPS)
    x = torch.randn(1, 4, ROWS, 12, generator=torch.Generator().manual_seed(0))
    given = {"generator": torch.Generator().manual_seed(1)}
    extra = given if "generator" in inspect.signature(scheduler.step).parameters else {}
    if name == "CogVideoXDPMScheduler":
        return stepped_with_history(scheduler, net, x)
    for t in scheduler.timesteps:
        both = torch.cat([x] * 2)
        both = scheduler.scale_model_input(both, t) if hasattr(scheduler, "scale_model_input") else both
        uncond, cond = net(both, t).chunk(2)
        x = scheduler.step(uncond + 3.5 * (cond - uncond), t, x, **extra, return_dict=False)[0]
    return x


def stepped_with_history(scheduler: Any, net: Net, x: Tensor) -> Tensor:
    """The loop of CogVideoX, whose scheduler takes what it returned before."""
    old, before = None, None
    for t in scheduler.timesteps:
        given = {"generator": torch.Generator().manual_seed(1), "return_dict": False}
        x, old = scheduler.step(net(x, t), old, t, before, x, **given)
        before = t
    return x


@pytest.mark.parametrize("name", first_of(SCHEDULERS, "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"))
def test_every_scheduler_ends_with_the_same_bits(name: str) -> None:
    net = Net(banded=True)
    found = looped(name, net)
    if name in WITHOUT_WAITING:
        assert net.asked == []  # nothing was fetched in the loop
    whole = found.whole() if isinstance(found, BandedTensor) else found
    assert torch.equal(whole, looped(name, Net(banded=False)))


def test_bands_are_asked_for_one_by_one() -> None:
    net = Net(banded=True)
    found = looped("FlowMatchEulerDiscreteScheduler", net)
    assert isinstance(found, BandedTensor)
    found.band(1)
    assert net.asked == [(call, 1) for call in range(STEPS)]
    found.band(1)
    assert len(net.asked) == STEPS
    found.whole()
    assert sorted(net.asked) == [(call, band) for call in range(STEPS) for band in range(len(SIZES))]


def banded(x: Tensor, dim: int = -2) -> BandedTensor:
    """x in two bands."""
    first = x.shape[dim] // 2
    parts = x.split((first, x.shape[dim] - first), dim)
    return BandedTensor.of(torch.full_like(x, torch.nan), dim, [part.shape[dim] for part in parts], parts.__getitem__)


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        *(("x + 1", True), ("x * y", True), ("y - x", True), ("x.float()", True), ("x.clamp(-1, 1)", True)),
        *(("x / y[..., :1]", True), ("x + y[0, 0, 0]", True), ("torch.cat([x, y])", True), ("x.chunk(2, 1)[1]", True)),
        *(("x.chunk(2, 2)[1]", False), ("torch.cat([x, y], -2)", False), ("x[:, :, 0]", False), ("x.mT", False)),
        *(("x.mean()", False), ("x.sum(1)", False), ("x.__iadd__(1)", False), ("x.flatten(1)", False)),
        ("x * y[:, :, :1]", True),
        *(("torch.lerp(x, y, 0.3)", True), ("torch.where(y > 0, x, y)", True), ("x.to(torch.float64)", True)),
        *(("torch.add(x, y, out=torch.empty(2, 4, 4, 4))", False), ("x @ y", False), ("x.numpy().sum()", False)),
    ],
)
def test_functions(name: str, stays: bool) -> None:
    x, y = (torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    known = {"torch": torch, "y": y}
    found, wanted = eval(name, known | {"x": banded(x)}), eval(name, known | {"x": x.clone()})
    assert isinstance(found, BandedTensor) and bool(found._source.missing) is True if stays else True
    if isinstance(found, BandedTensor):
        assert stays or not found._source.missing
        found = found.whole()
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))


def test_bands_of_other_rows_are_fetched_whole() -> None:
    x = torch.randn(2, 4, 4)
    parts = x.split((1, 3), -2)
    other = BandedTensor.of(torch.full_like(x, torch.nan), -2, (1, 3), parts.__getitem__)
    found = banded(x) + other
    assert type(found) is Tensor
    assert torch.equal(found, x + x)


def test_nothing_looks_like_a_result_before_it_is_here() -> None:
    found = banded(torch.randn(2, 4, 4)) * 2
    assert bool(found.buffer.isnan().all())


def test_where_a_band_comes_from_is_released_with_the_last_of_them() -> None:
    """Else the prediction of each step would hold those of all steps before it."""
    gc.disable()
    try:
        x = banded(torch.randn(2, 4, 4))
        before, found = weakref.ref(x), x + 1
        del x
        found.band(0)
        assert before() is not None
        found.band(1)
        assert before() is None
    finally:
        gc.enable()


def test_a_function_that_returns_no_tensor() -> None:
    assert banded(torch.randn(2, 4, 4)).type() == "torch.FloatTensor"


def test_a_tensor_that_changes_later_counts_as_it_was() -> None:
    x, y = torch.randn(2, 4, 4), torch.ones(2, 4, 4)
    found = banded(x) + y
    y.zero_()
    assert torch.equal(found.whole(), x + 1)


@pytest.mark.parametrize("write", ["x.add_(1)", "x.__iadd__(1)", "x.__setitem__(0, 7.0)", "torch.neg(x, out=x)"])
def test_what_was_computed_of_a_tensor_that_changes_later_counts_too(write: str) -> None:
    values = torch.randn(2, 4, 4)
    results = []
    for x in (banded(values), values.clone()):
        once = x * 2
        twice = once + 1
        eval(write, {"torch": torch, "x": x})
        results.append((twice, once, x))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found.whole() if isinstance(found, BandedTensor) else found, wanted)


def test_what_was_computed_of_several_tensors_counts_when_any_of_them_changes() -> None:
    values = torch.randn(2, 4, 4)
    x, y = banded(values), banded(values)
    found = x + y
    y.zero_()
    assert torch.equal(found.whole(), values + values)


@pytest.mark.parametrize("view", ["x[:, 1]", "x.mT", "x.flatten(1)", "x.split(2, 1)[0]"])
def test_what_was_computed_of_a_tensor_that_changes_through_a_view_counts_too(view: str) -> None:
    values = torch.randn(2, 4, 4)
    results = []
    for x in (banded(values), values.clone()):
        twice = x * 2
        eval(view).zero_()
        results.append(twice.whole() if isinstance(twice, BandedTensor) else twice)
    assert torch.equal(*results)


def test_a_band_alone_is_not_written_to_memory() -> None:
    """And is what the whole has there, before and after all bands are fetched."""
    found = torch.arange(24.0).reshape(1, 1, 6, 4)
    asked = list[int]()

    def fetch(band: int) -> Tensor:
        asked.append(band)
        return found.narrow(-2, 2 * band, 2)

    banded = BandedTensor.of(torch.full((1, 1, 6, 4), torch.nan), -2, (2, 2, 2), fetch)
    assert torch.equal(banded.alone(1), found.narrow(-2, 2, 2))
    assert asked == [1]
    assert bool(banded.buffer.isnan().all())
    assert torch.equal(banded.whole(), found)
    assert torch.equal(banded.alone(1), found.narrow(-2, 2, 2))
    assert asked == [1, 0, 1, 2]
