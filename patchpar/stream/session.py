"""A stream as its user holds it: chunks to iterate, and controls that say from which block and time they hold.

    push_audio, set_prompt, ... ---> driver ---> ranks
    for chunk in session        <--- [ chunks, at most as many as there is credit ] <--- driver

Nothing is queued beyond the credit, so that a slow watcher slows the stream down and memory does not grow; with
output="drop_oldest" or "skip_to_live" it loses chunks instead.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.launch.fork_guard import check_owner
from patchpar.stream.audio.track import AudioTrack
from patchpar.stream.delivery import Chunk, Effect, StreamDelivery, StreamFormat
from patchpar.stream.driver import AudioSource, OutputBlock, Run, Status, StreamDriver, StreamLimits
from patchpar.stream.events import Parameter, Transition
from patchpar.stream.journal import StreamJournal
from patchpar.stream.messages import PromptUpdate, ReferenceUpdate, StreamRun, Update
from patchpar.stream.output_queue import OutputQueue
from patchpar.stream.reference_image import reference_picture
from patchpar.stream.resources import Closing
from patchpar.stream.stage import StageStats

CLOSE_SECONDS = 60.0


class StreamSession(Closing):
    """One stream. `StreamingPipeline.stream` makes it; a context manager and an iterator, plain and async."""

    def __init__(
        self,
        run: Run,
        courses: Sequence[StreamRun],
        limits: StreamLimits,
        form: StreamFormat,
        delivery: StreamDelivery,
        source: AudioSource | None,
    ) -> None:
        self._format, self._delivery, self._source = form, delivery, source
        self._owner = os.getpid()
        self._changed = threading.Condition(threading.RLock())
        self._driver = StreamDriver(run, courses, limits, source, self._take_in, self._changed)
        self._outlet: OutputQueue[Chunk] = OutputQueue(delivery.output, delivery.lead, self._driver.give_back)
        self._journal: StreamJournal | None = None
        self._last: Chunk | None = None
        self._clock: float | None = None

    def begin(
        self, *wishes: Update, changes: Iterable[tuple[int, Update]] = (), journal: StreamJournal | None = None
    ) -> "StreamSession":
        """Set off with these conditions, and `changes` at their blocks. `journal` takes down what comes out."""
        self._journal = journal
        for block, wish in (*((0, wish) for wish in wishes), *changes):
            self._driver.wish(wish, block)
        self._driver.start()
        return self

    # --- chunks -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk. Raises WorkerError and the like if the stream cannot go on, LaunchError in a forked child."""
        check_owner(self._owner)
        with self._changed:
            while not self._changed.wait_for(lambda: len(self._outlet) or self._driver.is_over, self._delivery.hold):
                if self.status == "degraded" and self._last is not None:
                    return self._last
            if not len(self._outlet):
                if self._driver.error is not None:
                    raise self._driver.error
                raise StopIteration
            chunk = self._outlet.take()
        if self._delivery.pace == "realtime":
            self._wait_for(chunk)
        self._last = self._held(chunk)
        self._driver.give_back()
        return chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The same without blocking the event loop."""
        while (chunk := await asyncio.to_thread(next, self, None)) is not None:
            yield chunk

    def _take_in(self, came: OutputBlock) -> None:
        """What came out, under the lock."""
        produced, first = came.produced, self._format.first_frame(came.produced.block)
        missing = self._format.first_frame(produced.block + 1) - first - len(produced.frames)
        frames = produced.frames
        if missing > 0:  # a decoder that began anew gives one frame for its first latent frame
            frames = torch.cat([frames[:1].expand(missing, -1, -1, -1), frames])
        chunk = Chunk(
            block=produced.block,
            frames=frames,
            pts=first / self._format.fps,
            audio=came.samples,
            latency=produced.seconds,
            epoch=came.epoch,
        )
        if self._journal is not None:
            self._journal.note(came, frames)
        self._outlet.put(chunk)

    def _held(self, chunk: Chunk) -> Chunk:
        """The last frame of a chunk, to be shown again when no other comes."""
        pts = chunk.pts + (len(chunk.frames) - 1) / self._format.fps
        return replace(chunk, frames=chunk.frames[-1:].clone(), pts=pts, audio=None, is_held=True)

    def _wait_for(self, chunk: Chunk) -> None:
        """Until the chunk is due. A stream that was late goes on from now: lateness does not add up to haste."""
        now = time.monotonic()
        if self._clock is None or now > self._clock + chunk.pts:
            self._clock = now - chunk.pts
        time.sleep(max(0.0, self._clock + chunk.pts - now))

    # --- controls ---------------------------------------------------------------------------------------------------

    def push_audio(self, samples: Tensor, rate: int) -> Effect:
        """More sound, (N,) or (channels, N) between -1 and 1, at `rate` samples per second. Raises PlanError."""
        track = self._listening("use audio='live'")
        with self._changed:
            track.push(torch.as_tensor(samples), rate)
            return self._effect(self._driver.look())

    def end_audio(self) -> Effect:
        """There is no more sound to come: the stream ends with it."""
        track = self._listening("use stop()")
        with self._changed:
            track.end()
            return self._effect(self._driver.look())

    def set_prompt(
        self, text: str, *, at: int | None = None, transition: Transition = "switch", over: int = 0
    ) -> Effect:
        """Another prompt from block `at` on, or as soon as can be. See events.Prompt for the transitions."""
        return self._wished(PromptUpdate(text=text, transition=transition, over=over), at)

    def set_param(self, name: str, value: float, *, at: int | None = None) -> Effect:
        """Another value of a parameter, see events.PARAMETERS. Raises PlanError."""
        return self._wished(Parameter(name=name, value=value), at)

    def set_reference(self, reference: Any, *, at: int | None = None) -> Effect:
        """Another face: a file, a PIL picture, or (height, width, 3) in uint8 of the stream's size."""
        picture = reference_picture(reference, self._format.height, self._format.width)
        return self._wished(ReferenceUpdate(picture=picture), at)

    def pause(self) -> Effect:
        """Begin no further block until `resume`; what is under way comes out."""
        self._check_running()
        return self._effect(self._driver.pause(True))

    def resume(self) -> Effect:
        """Go on as if nothing had been."""
        self._check_running()
        return self._effect(self._driver.pause(False))

    def flush(self) -> int:
        """Throw away chunks that are ready and have not been taken; how many."""
        with self._changed:
            return self._outlet.flush()

    def stop(self) -> Effect:
        """Begin no further block; iteration ends when what is under way has come out."""
        return self._effect(self._driver.stop())

    def cancel(self) -> None:
        """End now: iteration ends, and what is under way is thrown away."""
        with self._changed:
            self._outlet.clear()
            self._driver.cancel()

    def close(self) -> None:
        """Cancel what is left and wait until the ranks are free. Raises PlanError if they are not within a minute."""
        self._driver.cancel()
        is_free = self.is_free_within(CLOSE_SECONDS)
        if self._journal is not None:
            self._journal.close()
        if not is_free:
            raise PlanError(f"the ranks have not let go of the stream within {CLOSE_SECONDS:g} s")

    def is_free_within(self, seconds: float) -> bool:
        """Wait for the ranks to be free of this stream; whether they are."""
        return self._driver.join(seconds)

    def _listening(self, instead: str) -> AudioTrack:
        self._check_running()
        if not isinstance(self._source, AudioTrack):
            raise PlanError(f"this stream does not listen, for its model has no ears: {instead}")
        return self._source

    def _check_running(self) -> None:
        if self.is_over:
            raise PlanError(f"this stream is {self.status}: begin another one")

    def _wished(self, wish: Update, at: int | None) -> Effect:
        self._check_running()
        return self._effect(self._driver.wish(wish, at))

    def _effect(self, block: int) -> Effect:
        return Effect(block=block, seconds=self._format.seconds(block))

    # --- what can be seen -------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """Where the stream is. "degraded": a worker has died, and the stream is being taken up again."""
        return self._driver.status

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come out, beyond what is ready."""
        return self._driver.is_over

    @property
    def dropped(self) -> int:
        """Chunks lost to a slow watcher, or flushed."""
        return self._outlet.dropped

    @property
    def in_flight(self) -> int:
        """Blocks that have begun and have not been taken."""
        return self._driver.in_flight

    @property
    def figures(self) -> tuple[StageStats, ...]:
        """What each stage did, when the stream has ended."""
        return self._driver.figures
