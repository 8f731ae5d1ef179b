"""A stream may go on for ever: what it holds does not grow, and its times stay exact."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.stage_loop import StageLoop
from patchpar.stream.delivery import StreamFormat
from patchpar.stream.fifo.stage import FifoStage
from patchpar.stream.stage import FinishedBlock, StageIO
from tests.breadth import first_of
from tests.stream.running import Script
from tests.stream.test_fifo import QUEUE, model, script
from tests.stream.tiny import run_of, stream

BLOCKS, WARM, APART = 40, 10, 10
"""Blocks of a stream, before the first look, and from look to look, each of which goes over all objects there are."""


@pytest.fixture(autouse=True)
def only_what_is_new() -> None:
    """Let the collector leave out all that is there before a stream: to go over it takes longer than the stream.

    It is left out to the end: `gc.unfreeze` would bring back all tests and modules too, for every later collection.
    """
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Of all tensors that somebody holds, and that are new."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def watched(run: Callable[[Callable[[FinishedBlock], object]], object], *, hoards: bool) -> list[int]:
    """Bytes held after every few blocks, the first ones left out, beyond those that are there without the stream.

    `hoards`: the watcher keeps what it gets.
    """
    held, kept, before = list[int](), list[FinishedBlock](), live_bytes()

    def put(finished: FinishedBlock) -> None:
        if hoards:
            kept.append(finished)
        if finished.block >= WARM and finished.block % APART == 0:
            held.append(live_bytes() - before)

    run(put)
    return held


def talk(put: Callable[[FinishedBlock], object]) -> None:
    around = StageIO(order=Script({}, blocks=BLOCKS).order, put=put, is_cancelled=lambda: False)
    StageLoop(stream(2), StreamPlan.even(2, 1), 0, None, around, run_of()).run()


def queue(put: Callable[[FinishedBlock], object]) -> None:
    around = StageIO(order=script(blocks=BLOCKS).order, put=put, is_cancelled=lambda: False)
    FifoStage(model(), StreamPlan.even(QUEUE.zones, 1), 0, None, around).run()


@pytest.mark.breadth
@pytest.mark.parametrize("run", first_of([talk, queue], talk))
def test_what_a_stream_holds_does_not_grow(run: Callable[[Callable[[FinishedBlock], object]], object]) -> None:
    held = watched(run, hoards=False)
    assert len(held) == (BLOCKS - WARM) // APART
    assert max(held) - min(held) < 0.02 * held[0]
    hoarded = watched(run, hoards=True)
    assert hoarded == sorted(hoarded)
    assert hoarded[-1] - hoarded[0] > 0.02 * held[0]


def test_times_are_exact_after_hours() -> None:
    """Frame number over rate: no sum that rounding could creep into."""
    form = StreamFormat(fps=25, height=8, width=8, frames=3, per_latent=4)
    hours = 10 * 3600
    block = form.blocks(hours)
    assert block is not None
    assert form.seconds(block) == form.first_frame(block) / 25 >= hours
    assert form.first_frame(block) == 1 + 4 * (3 * block - 1)
