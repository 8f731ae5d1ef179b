"""One rank of a frame queue (FIFO-Diffusion, arXiv:2405.11473): its zones, and the exchange with its neighbours.

    one tick      rank 0 (noise)   --- tick, frame that leaves --->   rank 1   --- ... --->   rank R-1 (clean, decodes)
                                   <--- frames before its own ---              <--- ... ---

A rank sends the leaving frame at the start of a tick, before it computes anything; the cleaner rank sends back frames
of its last tick. There is no collective, and the output does not depend on the number of ranks.
"""

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError
from patchpar.stream.fifo.model import FifoModel
from patchpar.stream.fifo.queue import FrameQueue
from patchpar.stream.plan import StreamPlan
from patchpar.stream.stage import FinishedBlock, Stage, StageIO
from patchpar.stream.stage_link import (
    WHERE,
    BlockEnvelope,
    BlockSignal,
    OutgoingMessages,
    check_connected,
    received,
)


class StageNeighbours(OutgoingMessages):
    """The exchange of context frames: received from the cleaner rank, sent to the noisier one."""

    def __init__(
        self, comm: Communicator | None, frame: TensorSpec, half: int, cleaner: int | None, noisier: int | None
    ) -> None:
        super().__init__()
        self._comm, self._cleaner, self._noisier = comm, cleaner, noisier
        batch, channels, _, *size = frame.shape
        self._spec = TensorSpec((batch, channels, half - 1, *size), frame.dtype)

    def send(self, last: Tensor) -> None:
        """Send this rank's last frames, [1, C, half - 1, H, W], to the noisier rank. Raises ExchangeError."""
        if self._comm is not None and self._noisier is not None:
            self.add(self._comm.send("context", WHERE, [self._noisier], [last.contiguous()]))

    def receive(self) -> Tensor | None:
        """Receive the cleaner rank's last frames, [1, C, half - 1, H, W]; None without one. Raises ExchangeError."""
        if self._comm is None or self._cleaner is None:
            return None
        return received(self._comm, "context", self._cleaner, [self._spec])[0]


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
        if number < self._model.first_frame or envelope.sign is not BlockSignal.BLOCK:
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

    _model: FifoModel

    def __init__(
        self, model: FifoModel, plan: StreamPlan, rank: int, comm: Communicator | None, stage_io: StageIO
    ) -> None:
        _check(model, plan, comm)
        super().__init__(model, plan, rank, comm, stage_io, model.first_frame)
        stage = self._position.stage
        self._zones, self._drain = stage.steps, model.queue.levels
        self._queue: FrameQueue | None = None
        noisier = rank - 1 if rank and stage.steps else None
        cleaner = None if stage.steps.stop == plan.steps else rank + 1
        self._neighbours = StageNeighbours(comm, model.payload()[0], model.queue.half, cleaner, noisier)
        self._exit = FrameExit(model, stage_io) if stage.decodes else None

    def _work(self, envelope: BlockEnvelope) -> None:
        """One tick."""
        (entering,), queue, first = envelope.payload, self._queue, self._model.first_frame
        is_tick = envelope.block >= first + self._model.queue.window  # earlier frames are those of the first video
        leaving = queue.first if queue is not None and is_tick else entering
        self._send(replace(envelope, payload=(leaving,)))
        if self._zones:
            for change in envelope.changes:
                self._model.apply(change)
            self._generate(envelope, is_tick=is_tick)
        if self._exit is not None:
            self._exit.take(envelope, leaving)

    def _generate(self, envelope: BlockEnvelope, *, is_tick: bool) -> None:
        """Advance this rank's zones by one tick."""
        is_first = envelope.block == self._model.first_frame
        if is_first:
            self._queue = self._model.first_queue(self._zones, lambda: not self._stage_io.is_cancelled())
        queue = self._queue
        assert queue is not None, "a stream begins with its first frame"
        if is_tick:
            queue.shift(envelope.payload[0], self._neighbours.receive())
            if envelope.sign is BlockSignal.BLOCK:
                self._model.advance(queue)
        if is_first or is_tick:
            self._neighbours.send(queue.last())

    def _settle(self) -> None:
        if self._exit is not None:
            self._exit.finish()
        if self._queue is not None:
            self._neighbours.receive()  # receive the last message, which is not used
        self._neighbours.settle()
        super()._settle()


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
