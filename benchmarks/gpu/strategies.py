"""One rank of a strategy on a fake GPU, step by step: what each kind of step does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.gpu.denoisers import Denoiser
from benchmarks.gpu.fake_cuda import DEVICE, EventCounts, fake_cuda
from benchmarks.gpu.fake_nccl import GroupCounts, fake_nccl
from benchmarks.gpu.recorder import CallCounts, LiveMemory, Recorder, Watcher
from benchmarks.gpu.tape import StorageNumbers, Tape
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.strategies import parse_strategy
from patchpar.strategies.cfg.split import GuidanceSplit

CFG = "cfg=2,patch=1"
ONE_KIND = {"exact": 1}
STEPS = {"exact": 0, "stale": 3}
"""Kinds of step, and the step that is counted of each: later ones are like it, once two values of the past are known.
Strategies without stale values have one kind only."""
DEADLINE = 60.0
NUM_TAPES = 4  # two pairs of steps, for buffers that are used in turns
Steps = dict[str, CallCounts]


class FakeRank:
    """Rank `rank` of `world` on a fake GPU; use it inside `fake_rank`."""

    def __init__(self, rank: int, world: int, events: EventCounts, groups: GroupCounts) -> None:
        self.rank, self.world = rank, world
        self._events, self._groups = events, groups

    def plain(self, denoiser: Denoiser) -> CallCounts:
        """Count a call of the model as it is."""
        return self._counted(LiveMemory(denoiser.tensors()), lambda: denoiser.network(**denoiser.call))

    def steps(self, denoiser: Denoiser, strategy: str, kinds: Mapping[str, int] | None = None) -> Steps:
        """Count one call of each kind of step of a strategy, or of `kinds`: the number of a step by its name."""
        comm = self._comm()
        if strategy == CFG:
            return self._in_turn(denoiser, self._guidance(denoiser, comm), comm, kinds or ONE_KIND)
        with installed(denoiser, strategy, comm, Mesh(self.rank, range(self.world), patch=self.world)) as step:
            return self._in_turn(denoiser, step, comm, kinds or (STEPS if has_stale_steps(strategy) else ONE_KIND))

    def _comm(self) -> Communicator:
        return Communicator(TorchTransport(DEVICE, DEADLINE))

    def _in_turn(
        self, denoiser: Denoiser, step: Callable[[], None], comm: Communicator, kinds: Mapping[str, int]
    ) -> Steps:
        memory, found = LiveMemory(denoiser.tensors()), {}
        names = {number: kind for kind, number in kinds.items()}
        for number in range(max(names) + 1):
            if number not in names:
                with Watcher(memory):
                    step()
                continue
            comm.traffic.clear()
            counts = found[names[number]] = self._counted(memory, step)
            counts.booked, counts.rounds = comm.traffic.bytes_sent.copy(), comm.traffic.rounds.copy()
        return found

    def _guidance(self, denoiser: Denoiser, comm: Communicator) -> Callable[[], None]:
        """Return what runs a step with two guidance branches, both in one call, on the first two ranks."""
        clock = StepClock(guided=True)
        split = GuidanceSplit(comm, Mesh(self.rank, range(2), cfg=2)["cfg"], clock)

        def step() -> None:
            clock.next_call()
            split.denoise(denoiser.network.forward, **denoiser.call)
            clock.tick()

        return step

    def tapes(self, denoiser: Denoiser, strategy: str) -> list[Tape]:
        """Record steps of a strategy that follow one another, after those in which its state is set up."""
        comm, memory, numbers = self._comm(), LiveMemory(()), StorageNumbers()
        with installed(denoiser, strategy, comm, Mesh(self.rank, range(self.world), patch=self.world)) as step:
            with Watcher(memory):
                for _ in range(max((STEPS if has_stale_steps(strategy) else ONE_KIND).values())):
                    step()
            tapes = []
            for _ in range(NUM_TAPES):
                tapes.append(Tape(memory, numbers, denoiser.tensors()))
                self._recorded(tapes[-1], step)
            return tapes

    def _counted(self, memory: LiveMemory, call: Callable[[], object]) -> CallCounts:
        gc.collect()
        memory.begin()
        gc.disable()  # what a cycle holds would be freed at one time or another
        recorder = Recorder(memory)
        try:
            self._recorded(recorder, call)
        finally:
            gc.enable()
        gc.collect()
        recorder.counts.peak, recorder.counts.held = memory.peak, memory.live()
        return recorder.counts

    def _recorded(self, recorder: Recorder, call: Callable[[], object]) -> None:
        """Run a call, and add to its counts what the stand-ins for streams and NCCL have counted meanwhile."""
        before, counts = self._outside(), recorder.counts
        with recorder:
            call()
        events, polls, groups, waits = (now - then for now, then in zip(self._outside(), before, strict=True))
        counts.events, counts.polls, counts.groups = events, polls, groups
        if waits:
            counts.syncs["a wait of the process for a stream or a message"] += waits

    def _outside(self) -> tuple[int, int, int, int]:
        """Return events recorded, questions whether something has ended, groups, and waits of the process."""
        events, groups = self._events, self._groups
        return events.recorded, events.polled + groups.polled, groups.groups, events.waits + groups.waits


def has_stale_steps(strategy: str) -> bool:
    """Whether steps of a strategy differ: exact ones at the beginning, then those with stale values."""
    return parse_strategy(strategy).policy.remembers


@contextmanager
def installed(denoiser: Denoiser, strategy: str, comm: Communicator, mesh: Mesh) -> Iterator[Callable[[], None]]:
    """Make a denoiser parallel over axis `patch`, and yield what runs one step of it. Stale steps follow one exact."""
    method, clock = parse_strategy(strategy), StepClock()
    method = replace(method, warmup_steps=1) if method.policy.remembers else method
    split = method.install(denoiser.network, comm, mesh["patch"], clock=clock, split="rows")
    denoiser.prepare(split)

    def step() -> None:
        clock.next_call()
        split.denoise(denoiser.network.forward, **denoiser.call)
        clock.tick()
        comm.traffic.book_stalls(block=False)

    try:
        yield step
    finally:
        split.finish()
        split.restore()


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[FakeRank]:
    """Open a fake GPU on which this process is rank `rank` of `world`."""
    events, groups = EventCounts(), GroupCounts()
    gc.collect()
    gc.freeze()  # what is there before is not collected again in every step, which takes longer than the step
    try:
        with fake_nccl(rank, world, groups), fake_cuda(events):
            yield FakeRank(rank, world, events, groups)
    finally:
        gc.unfreeze()
