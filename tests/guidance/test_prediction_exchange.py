"""Stamps of predictions that a GPU has received are checked at the end of their own call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.cfg.exchange import OutputForm, PredictionExchange, PredictionTime
from patchpar.strategies.cfg.split import GuidanceSplit, guidance_of
from tests.unit.threads import on_threads


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_stamps_of_a_call_that_has_failed_are_not_those_of_the_next() -> None:
    def on_rank(transport: object) -> None:
        split = GuidanceSplit(Communicator(transport), Axis("cfg", 0, 2, (0, 1)), StepClock())  # type: ignore[arg-type]
        stamp = torch.zeros(3, dtype=torch.int64)
        wrong = stamp.add(1).as_subclass(OnGpu)
        split._post.check(wrong, stamp, PredictionTime(0, 0), 1)
        with pytest.raises(ExchangeError, match="out of step"):
            split.finish()
        split._post.check(wrong, stamp, PredictionTime(0, 0), 1)  # of a call that never comes to its end
        split.reset()
        split.finish()

    assert on_threads(1, on_rank) == [None]


@pytest.mark.parametrize("ahead", [PredictionTime(step=1, call=0), PredictionTime(step=0, call=1)])
def test_a_prediction_of_another_step_or_call_is_not_used(ahead: PredictionTime) -> None:
    """Where each rank makes calls of its own, one of which is ahead."""
    times = PredictionTime(0, 0), ahead

    def on_rank(transport: Any) -> None:
        post = PredictionExchange(Communicator(transport), Axis("cfg", transport.rank, 2, (0, 1)))
        x, when = torch.ones(1, 2), times[transport.rank]
        form = OutputForm.of(x)
        assert form is not None
        post.send(x, form, when)
        post.expect(1 - transport.rank, form, when, at_once=True)
        post.settle()

    for rank, found in enumerate(on_threads(2, on_rank)):
        assert isinstance(found, ExchangeError)
        other = times[1 - rank]
        assert f"rank {rank} is at {times[rank]}, rank {1 - rank} at step {other.step}, call {other.call}" in str(found)


def test_a_scale_of_one_is_no_guidance() -> None:
    class Pipeline:
        def __call__(self, guidance_scale: float = 5.0) -> None: ...

    assert guidance_of(Pipeline(), {"guidance_scale": 1.0}) is False
    assert guidance_of(Pipeline(), {"guidance_scale": 1.01}) is None
