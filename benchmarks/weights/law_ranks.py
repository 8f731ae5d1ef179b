"""What each rank of `benchmarks.weights.laws` runs: passes of networks whose blocks sleep, over a delayed transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.weights.formulas import PipedCase, ShardedCase, StageCase
from benchmarks.weights.sleeping import WIDTH, SleepingChain, SleepingTransformer
from patchpar.comm.banded_tensor import BandedTensor
from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.pytree import tensors_in
from patchpar.comm.transport import DelayedTransport, Transport, connect
from patchpar.launch.executor import RankContext
from patchpar.plan.mesh import Axis, Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.weights.device_shards import DeviceShards
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.strategies.piped import PipedStages

STEP = 0.1  # of a prediction that is subtracted from the latent in a step


class Timed(NamedTuple):
    """Seconds of all passes together, until the slowest rank has ended, and of its own processor time in them.

    `sent`: bytes in one pass, by kind. `blocks`: those that this rank runs in one. `is_right`: outputs are those of the
    network on one rank; of pieces, those of all stages the same.
    """

    seconds: float
    processor: float
    sent: dict[str, float]
    blocks: int
    is_right: bool


class LawRank:
    """One rank. Those that a case does not have return None."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        self._connect(connect(context), context.beat)

    def _connect(self, bare: Transport, beat: Callable[[str], object] | None = None) -> None:
        self._line, self._bare = DelayedTransport(bare), Communicator(bare, beat)
        self._comm = Communicator(self._line, beat)

    @classmethod
    def over(cls, bare: Transport) -> LawRank:
        """Return a rank of a transport that is there."""
        rank = cls.__new__(cls)
        rank._connect(bare)
        return rank

    @torch.no_grad()
    def sharded(self, case: ShardedCase) -> Timed | None:
        """Passes of a chain with sharded weights."""
        if self._line.rank >= case.ranks:
            return None
        axis = Mesh(self._line.rank, range(case.ranks), patch=case.ranks)["patch"]
        torch.manual_seed(0)
        network, x = SleepingChain(case.blocks), torch.randn(1, WIDTH)
        wanted = network(x)
        weights = ShardedWeights(network.requires_grad_(False), DeviceShards(axis, x.device), slots=case.slots)
        weights.join(self._comm)
        self._link(case.latency, case.rate)
        for _ in range(2):  # in the first the order of blocks is learnt, the second ends with the first block's gather
            network(x)
        weights.settle()

        def run() -> list[Tensor]:
            found = [network(x) for _ in range(case.passes)]
            weights.settle()
            return found

        found, *figures = self._timed(axis, run, case.passes)
        self._link(0.0, float("inf"))
        weights.restore()
        return Timed(*figures, len(case.blocks), all(torch.equal(each, wanted) for each in found))

    @torch.no_grad()
    def stages(self, case: StageCase) -> Timed | None:
        """Calls of a transformer in exact stages."""
        if self._line.rank >= case.stages:
            return None
        axis, sleeping = self._stage_axis(case.stages), SleepingTransformer()
        network, call = sleeping.network, sleeping.call
        (wanted,) = network(**call)
        staged = StagedDenoiser(network, (self._comm, axis), None)
        staged.denoise(network.forward, **call)  # in which cuts are found
        sleeping.seconds = case.seconds
        self._link(case.latency, case.rate)
        run = lambda: [staged.denoise(network.forward, **call)[0] for _ in range(case.steps)]  # noqa: E731
        found, *figures = self._timed(axis, run, case.steps)
        own = len(staged._layouts[0][1].own_calls(axis.rank))
        self._link(0.0, float("inf"))
        sleeping.seconds = 0.0
        staged.restore()
        return Timed(*figures, own, all(torch.equal(each, wanted) for each in found))

    @torch.no_grad()
    def piped(self, case: PipedCase) -> Timed | None:
        """Steps of a transformer in pieces, after an exact step that is not timed."""
        if self._line.rank >= case.stages:
            return None
        axis, sleeping, clock = self._stage_axis(case.stages), SleepingTransformer(), StepClock()
        network = sleeping.network
        strategy = PipedStages(pieces=case.pieces)
        denoiser = strategy.install(network, self._comm, axis, clock=clock, verifications=None)
        image = _Image(denoiser, sleeping, clock)
        image.step()
        image.step()  # in pieces once, without sleeping: what is allocated then is there
        denoiser.finish()
        image.begin()
        image.step()
        sleeping.seconds = case.seconds
        self._link(case.latency, case.rate)

        def run() -> list[Tensor]:
            for _ in range(case.steps):
                image.step()
            denoiser.finish()
            return [image.whole_latent()]

        (latent,), *figures = self._timed(axis, run, case.steps)
        own = len(denoiser._known[0].whole.own_calls(axis.rank))
        self._link(0.0, float("inf"))
        sleeping.seconds = 0.0
        denoiser.restore()
        latents = AllGather(self._bare, axis, "meet", "latents").same(latent)
        return Timed(*figures, own, all(torch.equal(each, latent) for each in latents))

    def _stage_axis(self, stages: int) -> Axis:
        return Mesh(self._line.rank, range(stages), stage=stages)["stage"]

    def _link(self, latency: float, rate: float) -> None:
        self._line.latency, self._line.rate = latency, rate

    def _timed(
        self, axis: Axis, run: Callable[[], list[Tensor]], times: int
    ) -> tuple[list[Tensor], float, float, dict[str, float]]:
        """Return what `run` does, its seconds on the slowest rank, those of the processor, and bytes sent a time."""
        meet = AllGather(self._bare, axis, "meet", "meeting")
        meet.same(torch.zeros(1))
        self._comm.traffic.clear()
        start, processor = time.perf_counter(), time.process_time()
        found = run()
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        processor = time.process_time() - processor
        sent = {kind: count / times for kind, count in self._comm.traffic.bytes_sent.items() if count}
        return found, float(max(meet.same(taken))), processor, sent


class _Image:
    """The latent of an image whose denoiser is in pieces, step by step."""

    def __init__(self, denoiser: Any, sleeping: SleepingTransformer, clock: StepClock) -> None:
        self._denoiser, self._sleeping, self._clock = denoiser, sleeping, clock
        self.begin()

    def begin(self) -> None:
        """Begin an image."""
        self._clock.reset()
        self._denoiser.reset()
        self.latent = self._sleeping.call["hidden_states"]

    def step(self) -> None:
        """Make one step."""
        self._clock.next_call()
        given = self._sleeping.call | {"hidden_states": self.latent}
        (prediction,) = tensors_in(self._denoiser.denoise(self._sleeping.network.forward, **given))
        self.latent = self.latent - STEP * prediction.chunk(2, 1)[0]
        self._clock.tick()

    def whole_latent(self) -> Tensor:
        """Return the latent, of which bands may have to arrive."""
        return self.latent.whole() if isinstance(self.latent, BandedTensor) else self.latent
