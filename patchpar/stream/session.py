"""A stream as its user holds it: chunks to iterate, and controls that say from which block and time they hold.

    push_audio, set_prompt, ... ---> driver ---> ranks
    for chunk in session        <--- [ chunks, at most as many as there is credit ] <--- driver

Nothing is queued beyond the credit, so that a slow watcher slows the stream down and memory does not grow; with
output="drop_oldest" or "skip_to_live" it loses chunks instead.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, get_args

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.stream.driver import Driver, Limits, Run, Status
from patchpar.stream.events import Parameter, Transition
from patchpar.stream.stage import StageFigures
from patchpar.stream.talk import Course, Produced, Said, Shown, Wish
from patchpar.stream.track import AudioTrack, first_picture

Output = Literal["block", "drop_oldest", "skip_to_live"]
Pace = Literal["fast", "realtime"]
CLOSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """From when a control holds: block, and seconds from the beginning of the stream."""

    block: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Frames (frames, height, width, 3) in uint8 of one block.

    `pts`: seconds from the beginning of the stream to the first frame. `audio`: its samples (N,) between -1 and 1, or
    None. `latency`: seconds from the block's first step to its frames. `epoch`: how often the stream has been taken up
    again.
    """

    block: int
    frames: Tensor
    pts: float
    audio: Tensor | None
    latency: float
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Frames per second, latent frames per block, pictures per latent frame."""

    fps: float
    frames: int
    per_latent: int

    def first_frame(self, block: int) -> int:
        """The number of a block's first frame."""
        return first_picture(block * self.frames, self.per_latent)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelivery:
    """How chunks reach the watcher. Raises PlanError.

    `output`: while the watcher is slow, "block" waits; "drop_oldest" and "skip_to_live" lose chunks. `pace`: chunks as
    soon as they are there ("fast"), or by the clock ("realtime"). `lead`: chunks that may be ready beyond the blocks
    under way. `restarts`: how often the stream is taken up again when a worker has died.
    """

    output: Output = "block"
    pace: Pace = "fast"
    lead: int = 2
    restarts: int = 1

    def __post_init__(self) -> None:
        if self.output not in get_args(Output):
            raise PlanError(f"output={self.output!r}: use one of {', '.join(get_args(Output))}")
        if self.pace not in get_args(Pace):
            raise PlanError(f"pace={self.pace!r}: use 'fast' or 'realtime'")
        if self.lead < 1 or self.restarts < 0:
            raise PlanError(f"lead={self.lead}, restarts={self.restarts}: at least 1 and 0")


class StreamSession:
    """One stream. `StreamingPipeline.stream` makes it; a context manager and an iterator, plain and async."""

    def __init__(
        self,
        run: Run,
        course: Course,
        limits: Limits,
        timing: Timing,
        delivery: StreamDelivery,
        track: AudioTrack | None,
    ) -> None:
        self._timing, self._delivery, self._track = timing, delivery, track
        self._changed = threading.Condition(threading.RLock())
        self._chunks: deque[Chunk] = deque()
        self._room = delivery.lead
        self._dropped = 0
        self._clock: float | None = None
        self._driver = Driver(run, course, limits, track, self._take_in, self._changed)

    def begin(self, *wishes: Wish) -> "StreamSession":
        """Set off with these conditions."""
        for wish in wishes:
            self._driver.wish(wish, 0)
        self._driver.start()
        return self

    # --- chunks -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk. Raises WorkerError and the like if the stream cannot go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._driver.is_over)
            if not self._chunks:
                if self._driver.error is not None:
                    raise self._driver.error
                raise StopIteration
            if self._delivery.output == "skip_to_live":
                self._drop(len(self._chunks) - 1)
            chunk = self._chunks.popleft()
        if self._delivery.pace == "realtime":
            self._wait_for(chunk)
        self._driver.give_back()
        return chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The same without blocking the event loop."""
        while (chunk := await asyncio.to_thread(next, self, None)) is not None:
            yield chunk

    def _take_in(self, produced: Produced, samples: Tensor | None, epoch: int) -> None:
        """What came out, under the lock."""
        first = self._timing.first_frame(produced.block)
        missing = self._timing.first_frame(produced.block + 1) - first - len(produced.frames)
        frames = produced.frames
        if missing > 0:  # a decoder that began anew gives one frame for its first latent frame
            frames = torch.cat([frames[:1].expand(missing, -1, -1, -1), frames])
        pts = first / self._timing.fps
        self._chunks.append(
            Chunk(block=produced.block, frames=frames, pts=pts, audio=samples, latency=produced.seconds, epoch=epoch)
        )
        if self._delivery.output != "block":
            self._drop(len(self._chunks) - self._room)

    def _drop(self, count: int) -> None:
        for _ in range(max(0, count)):
            self._chunks.popleft()
            self._dropped += 1
            self._driver.give_back()

    def _wait_for(self, chunk: Chunk) -> None:
        """Until the chunk is due. A stream that was late goes on from now: lateness does not add up to haste."""
        now = time.monotonic()
        if self._clock is None or now > self._clock + chunk.pts:
            self._clock = now - chunk.pts
        time.sleep(max(0.0, self._clock + chunk.pts - now))

    # --- controls ---------------------------------------------------------------------------------------------------

    def push_audio(self, samples: Tensor, rate: int) -> Effect:
        """More sound, (N,) or (channels, N) between -1 and 1, at `rate` samples per second. Raises PlanError."""
        if self._track is None:
            raise PlanError(
                "this stream does not listen: the model has no ears, or audio=None was not meant to be live"
            )
        with self._changed:
            self._track.push(torch.as_tensor(samples), rate)
            return self._effect(self._driver.look())

    def end_audio(self) -> Effect:
        """There is no more sound to come: the stream ends with it."""
        if self._track is None:
            raise PlanError("this stream does not listen, so that there is no sound to end: use stop()")
        with self._changed:
            self._track.end()
            return self._effect(self._driver.look())

    def set_prompt(
        self, text: str, *, at: int | None = None, transition: Transition = "switch", over: int = 0
    ) -> Effect:
        """Another prompt from block `at` on, or as soon as can be. See events.Prompt for the transitions."""
        return self._wished(Said(text=text, transition=transition, over=over), at)

    def set_param(self, name: str, value: float, *, at: int | None = None) -> Effect:
        """Another value of a parameter, see events.PARAMETERS. Raises PlanError."""
        return self._wished(Parameter(name=name, value=value), at)

    def set_reference(self, picture: Tensor, *, at: int | None = None) -> Effect:
        """Another face: a picture (height, width, 3) in uint8 of the stream's size."""
        return self._wished(Shown(picture=torch.as_tensor(picture)), at)

    def pause(self) -> Effect:
        """Begin no further block until `resume`; what is under way comes out."""
        return self._effect(self._driver.pause(True))

    def resume(self) -> Effect:
        """Go on as if nothing had been."""
        return self._effect(self._driver.pause(False))

    def flush(self) -> int:
        """Throw away chunks that are ready and have not been taken; how many."""
        with self._changed:
            count = len(self._chunks)
            self._drop(count)
            return count

    def stop(self) -> Effect:
        """Begin no further block; iteration ends when what is under way has come out."""
        return self._effect(self._driver.stop())

    def cancel(self) -> None:
        """End now: iteration ends, and what is under way is thrown away."""
        with self._changed:
            self._chunks.clear()
            self._driver.cancel()

    def close(self) -> None:
        """Cancel what is left and wait until the ranks are free. Raises PlanError if they are not within a minute."""
        self._driver.cancel()
        if not self._driver.join(CLOSE_SECONDS):
            raise PlanError(f"the ranks have not let go of the stream within {CLOSE_SECONDS:g} s")

    def _wished(self, wish: Wish, at: int | None) -> Effect:
        if self._driver.is_over:
            raise PlanError(f"this stream is {self._driver.status}: begin another one")
        return self._effect(self._driver.wish(wish, at))

    def _effect(self, block: int) -> Effect:
        return Effect(block=block, seconds=self._timing.first_frame(block) / self._timing.fps)

    # --- what can be seen -------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """Where the stream is. "degraded": a worker has died, and the stream is being taken up again."""
        return self._driver.status

    @property
    def dropped(self) -> int:
        """Chunks lost to a slow watcher, or flushed."""
        return self._dropped

    @property
    def in_flight(self) -> int:
        """Blocks that have begun and have not been taken."""
        return self._driver.in_flight

    @property
    def figures(self) -> tuple[StageFigures, ...]:
        """What each stage did, when the stream has ended."""
        return self._driver.figures

    def __enter__(self) -> "StreamSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
