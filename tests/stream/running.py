"""Streams run in two ways: as one loop over all steps, the oracle, and as stages on ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.stage_loop import StageLoop
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Change, Reference
from patchpar.stream.messages import BeginBlock, EndStream
from patchpar.stream.stage import FinishedBlock, Order, StageIO, StageStats
from patchpar.stream.stage_link import Payload
from tests.stream.tiny import run_of, speech
from tests.unit.threads import on_threads

BLOCKS = 6
Changes = Mapping[int, tuple[Change, ...]]
Hears = bool | Callable[[int], Payload]
"""Whether blocks have sound, that of the tiny model; or what they begin with."""
Outcome = list[tuple[Tensor, Tensor]]
"""(latents, frames) of each block."""


def inputs_of(hears: Hears, block: int) -> Payload:
    if isinstance(hears, bool):
        return (speech(block),) if hears else ()
    return hears(block)


def serial(model: WanStream, changes: Changes, blocks: int = BLOCKS, hears: Hears = True) -> Outcome:
    """One process, one loop: every step of a block before the next block."""
    states = [model.new_state(step) for step in range(model.steps)]
    decoder = model.new_decoder()
    outcome: Outcome = []
    for block in range(blocks):
        due = list(changes.get(block, ()))
        early = [change for number in range(1, model.steps) for change in changes.get(number, ())]
        if block == model.steps and model.adapts_sink and not any(isinstance(c, Reference) for c in early):
            due.insert(0, Reference(latents=outcome[0][0][:, :, :1]))
        payload: Payload = model.begin(block, inputs_of(hears, block))
        for state in states:
            for change in due:
                model.apply(state, change)
            payload = model.step(state, block, payload)
        outcome.append((payload[0], model.decode(decoder, payload)))
    return outcome


@dataclass
class Script:
    """Orders written beforehand. `rests`: how often the stream rests before a block."""

    changes: Changes
    blocks: int = BLOCKS
    hears: Hears = True
    rests: dict[int, int] = field(default_factory=dict)

    def order(self, block: int, patience: float) -> Order:
        if self.rests.get(block, 0):
            self.rests[block] -= 1
            return None
        if block == self.blocks:
            return EndStream()
        inputs = inputs_of(self.hears, block)
        return BeginBlock(inputs=inputs, updates=self.changes.get(block, ()))


class Uneven:
    """A model whose steps take longer or shorter, by chance."""

    def __init__(self, model: Any, seconds: float, seed: int) -> None:
        self._model, self._seconds, self._chance = model, seconds, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, *args: Any) -> Payload:
        time.sleep(self._seconds * self._chance.random())
        return self._model.step(*args)


def stage(
    transport: Transport, models: Mapping[int, WanStream], plan: StreamPlan, script: Script, uneven: float = 0.0
) -> tuple[Outcome, StageStats]:
    """What one rank does; the one that decodes returns the frames."""
    outcome: Outcome = []

    def put(finished: FinishedBlock) -> None:
        assert finished.block == len(outcome), "blocks come out in order"
        outcome.append((finished.latents[0], finished.frames))

    around = StageIO(order=script.order, put=put, is_cancelled=lambda: False)
    model: Any = models[transport.rank]
    if uneven:
        model = Uneven(model, uneven, transport.rank)
    loop = StageLoop(model, plan, transport.rank, Communicator(transport), around, run_of())
    return outcome, loop.run()


def pipelined(
    make: Callable[[], WanStream], plan: StreamPlan, script: Script, uneven: float = 0.0
) -> tuple[Outcome, list[StageStats]]:
    """Ranks as threads, each with a model of its own, made here: weights are drawn from a generator of all threads."""
    models = {rank: make() for rank in range(plan.ranks)}
    found = on_threads(plan.ranks, stage, models, plan, script, uneven, deadline=60.0)
    errors = [error for error in found if isinstance(error, Exception)]
    if errors:
        raise errors[0]
    return found[-1][0], [figures for _, figures in found]


def differing(one: Outcome, other: Outcome) -> list[int]:
    """Blocks of which latents or frames are not the same bits."""
    assert len(one) == len(other)
    return [
        block
        for block, (a, b) in enumerate(zip(one, other, strict=True))
        if not all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    ]
