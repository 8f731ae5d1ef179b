"""Stamps of predictions that a GPU has received are checked at the end of their own call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.cfg.exchange import PredictionTime
from patchpar.strategies.cfg.split import GuidanceSplit
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
