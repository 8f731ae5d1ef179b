"""`StreamSession`: a video stream as an iterator of chunks, with controls that return when they take effect.

push_audio, set_prompt, ... ---> driver ---> ranks
for chunk in session        <--- [ chunks, at most as many as there is credit ] <--- driver
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PatchparError, PlanError
from patchpar.stream.audio_track import AudioTrack
from patchpar.stream.delivery import CATCH_UP, Chunk, Effect, RealtimeClock
from patchpar.stream.driver import StreamDriver
from patchpar.stream.events import Parameter, Transition
from patchpar.stream.journal import StreamJournal
from patchpar.stream.messages import BeginBlock, ProducedBlock, PromptUpdate, ReferenceUpdate, Update
from patchpar.stream.video_source import LiveVideo, load_reference_image

NOTED_SECONDS = 0.5
"""A chunk that is so late is worth a line in the log, once for each outage."""
log = logging.getLogger(__name__)


class StreamSession(StreamDriver):
    """One stream: a context manager and an iterator, plain and async. Controls return when they take effect."""

    _journal: StreamJournal | None = None
    _last: Chunk | None = None

    def begin(
        self, *updates: Update, changes: Iterable[tuple[int, Update]] = (), journal: StreamJournal | None = None
    ) -> "StreamSession":
        """Start with the conditions `updates`, and `changes` at their blocks. `journal` records the output."""
        self._journal, self._clock = journal, RealtimeClock()
        self._start((*((0, update) for update in updates), *changes))
        return self

    # --- chunks -----------------------------------------------------------------------------------------------------

    def _on_timeout(self) -> Chunk | None:
        return self._last if self.status == "degraded" else None

    def _on_output(self, item: Chunk) -> None:
        if self._delivery.pace == "realtime":
            self._wait_until_due(item)
        self._last = self._held(item)

    def _deliver(self, produced: ProducedBlock, begun: BeginBlock, samples: Tensor | None) -> None:
        """Queue a finished block as a chunk. Under the lock."""
        first = self._format.first_frame(produced.block)
        missing = self._format.first_frame(produced.block + 1) - first - len(produced.frames)
        frames = produced.frames
        if missing > 0:  # a new decoder gives one frame for its first latent frame
            frames = torch.cat([frames[:1].expand(missing, -1, -1, -1), frames])
        chunk = Chunk(
            block=produced.block,
            frames=frames,
            pts=first / self._format.fps,
            audio=samples,
            latency=produced.seconds,
            epoch=self._epoch,
        )
        if self._journal is not None:
            self._journal.note(chunk, begun, self._current, produced.lost)
        self._put(chunk)

    def _held(self, chunk: Chunk) -> Chunk:
        """The last frame of a chunk, to be repeated while no new chunk is ready."""
        pts = chunk.pts + (len(chunk.frames) - 1) / self._format.fps
        return replace(chunk, frames=chunk.frames[-1:].clone(), pts=pts, audio=None, is_held=True)

    def _wait_until_due(self, chunk: Chunk) -> None:
        """Sleep until a chunk is due; warn at the beginning of an outage."""
        clock = self._clock  # `resume`, in another thread, may begin another one
        now, before = time.monotonic(), clock.behind
        due = clock.due(chunk.pts, now, self.dropped)
        if self._delivery.output == "block" and clock.behind >= NOTED_SECONDS > before:
            log.warning(
                "block %d is %.1f s late; those after it follow at %g times their speed until that is made up: to go "
                "on live at once, use output='skip_to_live', or --late skip_to_live",
                chunk.block,
                clock.behind,
                CATCH_UP,
            )
        self._sleep(due - now)

    def _sleep(self, seconds: float) -> None:
        """Wait, unless the stream is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self.status == "cancelled", seconds)

    @property
    def behind(self) -> float:
        """Seconds that chunks come later than at the beginning of the stream, with pace="realtime"."""
        return self._clock.behind

    # --- controls ---------------------------------------------------------------------------------------------------

    def push_audio(self, samples: Tensor, rate: int) -> Effect:
        """Append audio [N] or [channels, N] between -1 and 1, at `rate` samples per second. Raises PlanError."""
        track = self._live_audio("use audio='live'")
        with self._changed:
            track.push(torch.as_tensor(samples), rate)
            return self._look()

    @property
    def is_kept_alive(self) -> bool:
        """Whether silence takes the place of live audio that comes late; otherwise the stream waits for it."""
        return isinstance(self._track, AudioTrack) and self._track.is_kept_alive

    @property
    def audio_ahead(self) -> float:
        """Seconds of audio that are there for blocks that have not begun; 0 for a stream without live audio."""
        if not isinstance(self._track, AudioTrack):
            return 0.0
        with self._changed:
            return self._track.seconds_from(self._upcoming())

    def push_frame(self, image: Any) -> Effect:
        """Append the next frame of the video: PIL, or [height, width, 3] in uint8, in pixels. Raises PlanError.

        Where the ranks are slower than the frames come, the oldest that wait are dropped.
        """
        self._check_running()
        video = self._frames.video
        if not isinstance(video, LiveVideo):
            raise PlanError("this stream takes no frames: use video='live'")
        frame = load_reference_image(image, self._format.height, self._format.width)
        with self._changed:
            video.push(frame)
            return self._look()

    def interrupt(self) -> Effect:
        """Drop the audio of blocks that have not begun; what is pushed next is heard from there on. Raises PlanError.

        Chunks that are ready stay: `flush` drops these.
        """
        track = self._live_audio("use stop()")
        with self._changed:
            block = self._upcoming()
            track.interrupt(block)
            return self._effect(block)

    def resume(self) -> Effect:
        """Continue after `pause`; the next chunk is on time."""
        self._clock = RealtimeClock()
        return super().resume()

    def end_audio(self) -> Effect:
        """End the audio; the stream ends with it. Raises PlanError."""
        track = self._live_audio("use stop()")
        with self._changed:
            track.end()
            return self._look()

    def set_prompt(
        self, text: str, *, at: int | None = None, transition: Transition = "switch", over: int = 0
    ) -> Effect:
        """Set another prompt from block `at` on, by default the next. See events.Prompt. Raises PlanError."""
        return self._update(PromptUpdate(text=text, transition=transition, over=over), at)

    def set_param(self, name: str, value: float, *, at: int | None = None) -> Effect:
        """Set another value of a parameter, see events.PARAMETERS. Raises PlanError."""
        return self._update(Parameter(name=name, value=value), at)

    def set_reference(self, reference: Any, *, at: int | None = None) -> Effect:
        """Set another reference: a file, a PIL image, or [height, width, 3] in uint8. Raises PlanError."""
        image = load_reference_image(reference, self._format.height, self._format.width)
        return self._update(ReferenceUpdate(image=image), at)

    def close(self) -> None:
        """Cancel the stream and wait until the ranks are free. Raises PlanError if they are not within a minute."""
        try:
            super().close()
        finally:
            if self._journal is not None:
                self._journal.close()

    @property
    def record_error(self) -> PatchparError | None:
        """Why the recording of this stream ends before it; None if it does not, or there is none."""
        return None if self._journal is None else self._journal.error

    def _live_audio(self, instead: str) -> AudioTrack:
        self._check_running()
        if not isinstance(self._track, AudioTrack):
            raise PlanError(f"this stream takes no audio: {instead}")
        return self._track
