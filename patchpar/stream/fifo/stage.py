"""One rank of a frame queue (FIFO-Diffusion, arXiv:2405.11473): its zones, and the exchange with its neighbours.

    one tick      rank 0 (noise)   --- tick, frame that leaves --->   rank 1   --- ... --->   rank R-1 (clean, decodes)
                                   <--- frames before its own ---              <--- ... ---

A rank sends the leaving frame at the start of a tick, before it computes anything; the cleaner rank sends back frames
of its last tick. There is no collective, and the output does not depend on the number of ranks.
"""

import time
from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError
from patchpar.stream.events import Change
from patchpar.stream.fifo.model import FifoModel
from patchpar.stream.fifo.queue import FrameQueue
from patchpar.stream.plan import StreamPlan
from patchpar.stream.stage import FinishedBlock, Stage, StageIO, order_patience
from patchpar.stream.stage_link import (
    BlockEnvelope,
    BlockSignal,
    Downstream,
    OutgoingMessages,
    Upstream,
    check_connected,
    connected,
)


class FrameEntrance:
    """Inlet of the first rank: a noise frame per order, then ticks until the last frame has left the queue.

    `patience`: seconds that it waits for an order.
    """

    def __init__(self, model: FifoModel, stage_io: StageIO, patience: float) -> None:
        self._model, self._stage_io, self._patience = model, stage_io, patience
        self._block = model.first_frame
        self._left: int | None = None  # ticks until the last frame has left

    def take(self) -> BlockEnvelope:
        """Return the next message, see StageInlet."""
        if self._stage_io.is_cancelled():
            return BlockEnvelope(sign=BlockSignal.END)
        if self._left is not None:
            return self._drained()
        order = self._stage_io.order(self._block, self._patience)
        if order.sign is BlockSignal.END and self._block > self._model.first_frame:
            self._left = self._model.queue.levels
            return self.take()
        if order.sign is not BlockSignal.BLOCK:
            return BlockEnvelope(sign=order.sign)
        return self._entering(order.changes)

    def _drained(self) -> BlockEnvelope:
        assert self._left is not None
        if self._left == 0:
            return BlockEnvelope(sign=BlockSignal.END)
        self._left -= 1
        return self._entering(())

    def _entering(self, changes: tuple[Change, ...]) -> BlockEnvelope:
        block, self._block = self._block, self._block + 1
        payload, born = (self._model.entering(block),), time.time_ns()
        return BlockEnvelope(sign=BlockSignal.BLOCK, block=block, born=born, changes=changes, payload=payload)


class StageNeighbours:
    """The exchange of context frames: received from the cleaner rank, sent to the noisier one."""

    def __init__(
        self, comm: Communicator | None, frame: TensorSpec, half: int, cleaner: int | None, noisier: int | None
    ) -> None:
        self._comm, self._cleaner, self._noisier = comm, cleaner, noisier
        batch, channels, _, *size = frame.shape
        self._spec = TensorSpec((batch, channels, half - 1, *size), frame.dtype)
        self._leaving = OutgoingMessages()

    def send(self, last: Tensor) -> None:
        """Send this rank's last frames, [1, C, half - 1, H, W], to the noisier rank. Raises ExchangeError."""
        if self._comm is not None and self._noisier is not None:
            self._leaving.add(self._comm.send("context", "queue", [self._noisier], [last.contiguous()]))

    def receive(self) -> Tensor | None:
        """Receive the cleaner rank's last frames, [1, C, half - 1, H, W]; None without one. Raises ExchangeError."""
        if self._comm is None or self._cleaner is None:
            return None
        return self._comm.receive("context", "queue", self._cleaner, [self._spec]).wait_for(0)[0]

    def settle(self) -> None:
        """Wait until all messages have been sent. Raises ExchangeError."""
        self._leaving.settle()


class FrameExit:
    """Decodes finished latent frames, and holds each until all its images are decoded."""

    def __init__(self, model: FifoModel, stage_io: StageIO) -> None:
        self._model, self._stage_io = model, stage_io
        self._memory = model.decoder.new_state()
        self._born: dict[int, int] = {}  # of the frames in the queue
        self._waiting: deque[tuple[int, Tensor]] = deque()
        self._images: list[Tensor] = []
        self._count = 1  # images of the next frame

    def take(self, envelope: BlockEnvelope, frame: Tensor) -> None:
        """Decode a frame [1, C, 1, H, W] that left the queue in this tick. Those before the first are dropped."""
        self._born[envelope.block] = envelope.born
        number = envelope.block - self._model.queue.levels
        if number < self._model.first_frame or self._stage_io.is_cancelled():
            return
        self._waiting.append((number, frame))
        self._show(self._model.decode(self._memory, frame))

    def finish(self) -> None:
        """Decode the remaining images, after the last frame."""
        if self._waiting and not self._stage_io.is_cancelled():
            self._show(self._model.decode(self._memory, None))

    def _show(self, images_FHWC: Tensor) -> None:
        self._images += images_FHWC.unbind(0)
        while self._waiting and len(self._images) >= self._count:
            number, frame = self._waiting.popleft()
            frames, self._images = torch.stack(self._images[: self._count]), self._images[self._count :]
            self._count = self._model.decoder.per_latent
            self._stage_io.put(
                FinishedBlock(block=number, frames=frames, latents=(frame,), born=self._born.pop(number))
            )


class FifoStage(Stage):
    """Runs rank `rank` of `plan`, whose steps are zones, in one stream. Raises PlanError."""

    def __init__(
        self, model: FifoModel, plan: StreamPlan, rank: int, comm: Communicator | None, stage_io: StageIO
    ) -> None:
        _check(model, plan, comm)
        stages, specs = plan.stages, model.payload()
        stage = stages[rank]
        super().__init__(rank, comm, stage_io)
        self._model, self._zones = model, stage.steps
        self._queue: FrameQueue | None = None
        is_last = stage.steps.stop == plan.steps
        noisier = rank - 1 if rank and stage.steps else None
        cleaner = None if is_last else rank + 1
        self._neighbours = StageNeighbours(comm, specs[0], model.queue.half, cleaner, noisier)
        self._out = Downstream(connected(comm), [rank + 1], specs) if rank + 1 < len(stages) else None
        self._exit = FrameExit(model, stage_io) if stage.decodes else None
        if rank == 0:
            self._in = FrameEntrance(model, stage_io, order_patience(comm))
        else:
            self._in = Upstream(connected(comm), rank - 1, specs)

    def _handle(self, envelope: BlockEnvelope) -> None:
        if envelope.sign is BlockSignal.BLOCK:
            self._tick(envelope)
        elif self._out is not None:
            self._out.send(envelope)

    def _tick(self, envelope: BlockEnvelope) -> None:
        entering, queue = envelope.payload[0], self._queue
        first = self._model.first_frame
        is_tick = envelope.block >= first + self._model.queue.window  # earlier frames are those of the first video
        leaving = queue.first if queue is not None and is_tick else entering
        if self._out is not None:
            self._out.send(replace(envelope, payload=(leaving,)))
        if self._zones:
            for change in envelope.changes:
                self._model.apply(change)
            self._generate(envelope.block == first, is_tick, entering)
        if self._exit is not None:
            self._exit.take(envelope, leaving)

    def _generate(self, is_first: bool, is_tick: bool, entering: Tensor) -> None:
        """Advance this rank's zones by one tick."""
        if is_first:
            self._queue = self._model.first_queue(self._zones, lambda: not self._stage_io.is_cancelled())
        queue = self._queue
        assert queue is not None, "a stream begins with its first frame"
        if is_tick:
            queue.shift(entering, self._neighbours.receive())
            if not self._stage_io.is_cancelled():
                self._model.advance(queue)
        if is_first or is_tick:
            self._neighbours.send(queue.last())

    def _settle(self) -> None:
        if self._exit is not None:
            self._exit.finish()
        if self._queue is not None:
            self._neighbours.receive()  # receive the last message, which is not used
        self._neighbours.settle()
        if self._out is not None:
            self._out.settle()


def fifo_plan(zones: int, ranks: int) -> StreamPlan:
    """Return a plan that assigns zones to ranks as evenly as possible; the last rank decodes. Raises PlanError."""
    if ranks > zones + 1:
        raise PlanError(
            f"{ranks} ranks, but a queue of {zones} zones uses at most {zones + 1}: use at most {zones + 1}, or more "
            "partitions"
        )
    return StreamPlan.even(zones, ranks)


def _check(model: FifoModel, plan: StreamPlan, comm: Communicator | None) -> None:
    if plan.steps != model.queue.zones:
        raise PlanError(f"the plan has {plan.steps} zones, but the queue has {model.queue.zones}")
    if plan.inner > 1:
        raise PlanError(
            f"inner={plan.inner}: a zone is denoised by one rank; use inner=1, and more partitions for more ranks"
        )
    check_connected(plan.ranks, comm)
