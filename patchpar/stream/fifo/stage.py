"""One rank of a frame queue (FIFO-Diffusion, arXiv:2405.11473): its zones, and the exchange with its neighbours.

    one tick      rank 0 (noise)   --- tick, frame that leaves --->   rank 1   --- ... --->   rank R-1 (clean, decodes)
                                   <--- frames before its own ---              <--- ... ---

A rank sends the leaving frame at the start of a tick, before it computes anything; the cleaner rank sends back frames
of its last tick. There is no collective, and the output does not depend on the number of ranks.

Shapes: B batch, C channels, F latent frames, H x W latent pixels, T text tokens, D width.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.models.streaming.decoder import as_pixels
from patchpar.models.streaming.fifo.network import FrameDecoder, FrameNetwork
from patchpar.models.streaming.fifo.queue import FIRST_NOISE, FifoOptions, FrameQueue, first_queue, generate_first_video
from patchpar.models.streaming.flow_schedule import keyed_noise
from patchpar.plan.stream_plan import StreamPlan
from patchpar.shard.host_memory import to_device
from patchpar.stream.events import Change, Prompt, StepConditions
from patchpar.stream.messages import StreamRun
from patchpar.stream.stage import FinishedBlock, Stage, StageIO
from patchpar.stream.stage_link import WHERE, BlockEnvelope, BlockSignal, OutgoingMessages, Payload, received


class FifoModel:
    """One stream on this rank. Without denoising `network` has no weights; without decoding `decoder` is None."""

    def __init__(self, network: FrameNetwork, decoder: FrameDecoder | None, queue: FifoOptions, run: StreamRun) -> None:
        self.queue, self.first_frame = queue, run.first_block
        self._network, self.decoder, self._run = network, decoder, run
        self._texts: tuple[StepConditions, ...] = ()  # the prompt, and the negative prompt if there is one

    def payload(self) -> tuple[TensorSpec, ...]:
        """Return shape and dtype of the frame passed from rank to rank: latents [1, C, 1, H, W] in float32."""
        return (TensorSpec((1, self._network.channels, 1, self._run.rows, self._run.columns), torch.float32),)

    def begin(self, block: int, inputs: Payload) -> Payload:
        """Return the noise [1, C, 1, H, W] of frame number `block`."""
        return (keyed_noise(self._run.seed, block, FIRST_NOISE, self.payload()[0].shape, self._network.device),)

    def apply(self, change: Change) -> None:
        """Set another prompt from the next tick on, at once or in a blend. Raises PlanError."""
        assert isinstance(change, Prompt), "a FifoSession changes nothing else"
        given = [change.text, change.negative if self._run.guidance_scale > 1 else None]
        # On ranks that get them by message they are in host memory.
        texts = [to_device(text, self._network.device) for text in given if text is not None]
        known = self._texts or [StepConditions(text=text) for text in texts]
        self._texts = tuple(now.prompted(text, change) for now, text in zip(known, texts, strict=True))

    @torch.no_grad()
    def first_queue(self, zones: range, wanted: Callable[[], bool]) -> FrameQueue:
        """Return the first queue of a stream, these zones of it. Denoising stops early if not `wanted`."""
        first, window = self.first_frame, self.queue.window
        noise = torch.cat([self.begin(first + frame, ())[0] for frame in range(window)], 2)
        video = generate_first_video(self.queue, noise, self._velocity, wanted)
        return first_queue(self.queue, zones, video, self._run.seed, first)

    @torch.no_grad()
    def advance(self, queue: FrameQueue) -> None:
        """Denoise a queue by one tick, after its `shift`."""
        self._texts = tuple(text.advanced() for text in self._texts)
        queue.advance(self._velocity)

    def _velocity(self, x_BCFHW: Tensor, sigmas: Sequence[float]) -> Tensor:
        conditional, *others = (self._network.predict(x_BCFHW, sigmas, known.text) for known in self._texts)
        if not others:
            return conditional
        (unconditional,) = others
        return unconditional + self._run.guidance_scale * (conditional - unconditional)


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
        assert model.decoder is not None, "the rank that decodes has the decoder"
        self._model, self._stage_io, self._decoder = model, stage_io, model.decoder
        self._memory: Any = model.decoder.new_state()
        self._born: dict[int, int] = {}  # of the frames in the queue
        self._waiting: deque[tuple[int, Tensor]] = deque()
        self._images: list[Tensor] = []
        self._count = 1  # images of the next frame

    @torch.no_grad()
    def take(self, envelope: BlockEnvelope, frame: Tensor) -> None:
        """Decode a frame [1, C, 1, H, W] that left the queue in this tick. Those before the first are dropped."""
        self._born[envelope.block] = envelope.born
        number = envelope.block - self._model.queue.levels
        if number < self._model.first_frame or envelope.sign is not BlockSignal.BLOCK:
            return
        self._waiting.append((number, frame))
        self._put(self._decoder.decode(self._memory, frame))

    @torch.no_grad()
    def finish(self) -> None:
        """Decode the remaining images, after the last frame."""
        if self._waiting and not self._stage_io.is_cancelled():
            self._put(self._decoder.finish(self._memory))

    def _put(self, images_FCHW: Tensor) -> None:
        self._images += as_pixels(images_FCHW).unbind(0)
        while self._waiting and len(self._images) >= self._count:
            number, frame = self._waiting.popleft()
            frames, self._images = torch.stack(self._images[: self._count]), self._images[self._count :]
            self._count = self._decoder.per_latent
            self._stage_io.put(
                FinishedBlock(block=number, frames=frames, latents=(frame,), born=self._born.pop(number))
            )


class FifoStage(Stage):
    """Runs rank `rank` of `plan`, whose steps are zones, in one stream."""

    _model: FifoModel

    def __init__(
        self, model: FifoModel, plan: StreamPlan, rank: int, comm: Communicator | None, stage_io: StageIO
    ) -> None:
        super().__init__(model, plan, rank, comm, stage_io, model.first_frame)
        stage = self._position.stage
        self._zones, self._drain = stage.steps, model.queue.levels
        self._queue: FrameQueue | None = None
        noisier = rank - 1 if rank and stage.steps else None
        cleaner = None if stage.steps.stop == plan.steps else rank + 1
        self._neighbours = StageNeighbours(comm, model.payload()[0], model.queue.half, cleaner, noisier)
        self._exit = FrameExit(model, stage_io) if stage.decodes else None

    def _work(self, envelope: BlockEnvelope) -> None:
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
