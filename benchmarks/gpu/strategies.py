"""One rank of a strategy on a fake GPU, step by step: what each kind of step does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.gpu.denoisers import Denoiser
from benchmarks.gpu.fake_cuda import DEVICE, EventCounts, fake_cuda
from benchmarks.gpu.fake_nccl import GroupCounts, fake_nccl
from benchmarks.gpu.recorder import CallCounts, LiveMemory, Recorder
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.strategies import parse_strategy
from patchpar.strategies.cfg.split import GuidanceSplit

CFG = "cfg=2,patch=1"
STEPS = {"exact": 0, "stale": 3}
"""Kinds of step of a strategy with stale values, and the first step of each: two values of the past are known by then,
so that later ones are like it. The others have one kind only."""
DEADLINE = 60.0
Steps = dict[str, CallCounts]


class FakeRank:
    """Rank `rank` of `world` on a fake GPU; use it inside `fake_rank`."""

    def __init__(self, rank: int, world: int, events: EventCounts, groups: GroupCounts) -> None:
        self.rank, self.world = rank, world
        self._events, self._groups = events, groups

    def plain(self, denoiser: Denoiser) -> CallCounts:
        """Count a call of the model as it is."""
        return self._counted(LiveMemory(denoiser.tensors()), lambda: denoiser.network(**denoiser.call))

    def steps(self, denoiser: Denoiser, strategy: str) -> Steps:
        """Count one call of each kind of step of a strategy."""
        if strategy == CFG:
            return {"exact": self._guidance(denoiser)}
        method = parse_strategy(strategy)
        remembers = method.policy.remembers
        method = replace(method, warmup_steps=1) if remembers else method
        comm, clock, axis = self._comm(), StepClock(), Mesh(self.rank, range(self.world), patch=self.world)["patch"]
        split = method.install(denoiser.network, comm, axis, clock=clock, split="rows")
        denoiser.prepare(split)

        def step() -> None:
            clock.next_call()
            split.denoise(denoiser.network.forward, **denoiser.call)
            clock.tick()
            comm.traffic.clear()

        try:
            return self._in_turn(denoiser, step, STEPS if remembers else {"exact": 1})
        finally:
            split.finish()
            split.restore()

    def _in_turn(self, denoiser: Denoiser, step: Callable[[], None], kinds: dict[str, int]) -> Steps:
        memory, found = LiveMemory(denoiser.tensors()), []
        for _ in range(max(kinds.values()) + 1):
            found.append(self._counted(memory, step))
        return {kind: found[number] for kind, number in kinds.items()}

    def _guidance(self, denoiser: Denoiser) -> CallCounts:
        """One step with its two guidance branches on two ranks, both in one call of the pipeline."""
        clock = StepClock(guided=True)
        split = GuidanceSplit(self._comm(), Mesh(self.rank, range(self.world), cfg=self.world)["cfg"], clock)

        def step() -> None:
            clock.next_call()
            split.denoise(denoiser.network.forward, **denoiser.call)
            clock.tick()

        return self._in_turn(denoiser, step, {"exact": 1})["exact"]

    def _comm(self) -> Communicator:
        return Communicator(TorchTransport(DEVICE, DEADLINE))

    def _counted(self, memory: LiveMemory, call: Callable[[], object]) -> CallCounts:
        recorder = Recorder(memory, self.world)
        events, groups, waits = self._events.recorded, self._groups.groups, self._events.waits + self._groups.waits
        gc.collect()
        memory.begin()
        with recorder:
            call()
        counts = recorder.counts
        counts.events, counts.groups = self._events.recorded - events, self._groups.groups - groups
        blocking = self._events.waits + self._groups.waits - waits
        if blocking:
            counts.syncs["a wait of the process for a stream or a message"] += blocking
        gc.collect()
        counts.peak, counts.held = memory.peak, memory.live()
        return counts


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[FakeRank]:
    """Open a fake GPU on which this process is rank `rank` of `world`."""
    events, groups = EventCounts(), GroupCounts()
    with fake_nccl(rank, world, groups), fake_cuda(events):
        yield FakeRank(rank, world, events, groups)
