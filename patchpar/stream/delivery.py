"""Output of a stream: chunks of frames with timestamps, their pacing, and the policy for a slow consumer."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.streaming.config import LEAST_FPS, MOST_FPS
from patchpar.plan.json_fields import number
from patchpar.plan.scalars import is_number, is_whole, make_plain, plain
from patchpar.stream.audio_track import first_frame_number

Output = Literal["block", "drop_oldest", "skip_to_live"]
Pacing = Literal["fast", "realtime"]
LONGEST = 1e9
"""Seconds of a stream with an end: 32 years."""
CATCH_UP = 1.1
"""Speed of the chunks that follow a late one, until they are due as early as they were at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Block, and seconds from the beginning of the stream, at which a control takes effect."""

    block: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Frames [frames, height, width, 3] in uint8 of one block.

    `pts`: seconds from the beginning of the stream to the first frame. `audio`: its samples [N] between -1 and 1, or
    None. `latency`: seconds from the block's first step to its frames. `epoch`: how often the stream has been resumed.
    `is_held`: the last frame repeated instead of a new block, see StreamDelivery.
    """

    block: int
    frames: Tensor
    pts: float
    audio: Tensor | None
    latency: float
    epoch: int
    is_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFormat:
    """Frames per second, their height and width, latent frames per block, images per latent frame."""

    fps: float
    height: int
    width: int
    frames: int
    per_latent: int

    def first_frame(self, block: int) -> int:
        return first_frame_number(block * self.frames, self.per_latent)

    def frames_of(self, block: int) -> int:
        return self.first_frame(block + 1) - self.first_frame(block)

    def seconds(self, block: int) -> float:
        """Return the time of a block's first frame, in seconds from the beginning of the stream."""
        return self.first_frame(block) / self.fps

    def blocks(self, seconds: float | None) -> int | None:
        """Return the number of blocks for so many seconds; None for a stream without end. Raises PlanError."""
        if seconds is None:
            return None
        known = plain(seconds)
        if not is_number(known, 0, LONGEST) or not known:
            raise PlanError(f"seconds={known!r:.80}: it must be above 0, and at most {LONGEST:g}; None for no end")
        frames = math.ceil(known * self.fps - 1e-6)  # seconds of whole frames are rounded
        latents = 1 + max(0, math.ceil((frames - 1) / self.per_latent))  # the first one is one image
        return math.ceil(latents / self.frames)


def check_output(output: str, lead: int, restarts: int) -> None:
    """Raise PlanError for an unknown policy, `lead` below 1 output, or `restarts` below 0."""
    if output not in get_args(Output):
        raise PlanError(f"output={output!r}: use one of {', '.join(get_args(Output))}")
    if not is_whole(lead) or not is_whole(restarts, 0):
        raise PlanError(
            f"lead={lead!r}, restarts={restarts!r}: use whole numbers, lead at least 1 and restarts at least 0"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelivery:
    """How chunks are delivered to the consumer. Raises PlanError.

    `output`: for a slow consumer, "block" waits; "drop_oldest" and "skip_to_live" drop chunks. `pace`: chunks as soon
    as they are ready ("fast"), or at their timestamps ("realtime"). `lead`: chunks that may be ready beyond the blocks
    in flight. `restarts`: how often within a minute the stream is resumed after a worker has died. `hold`: meanwhile
    the last frame is repeated every so many seconds, as a chunk with `is_held`; None for no such chunks. `keep_alive`:
    with audio="live", silence where no audio has been pushed in time, so that frames go on. `fps`: frames per second
    of the timestamps, by default the model's. `record`: a file to record the stream in, see StreamingPipeline.replay.
    """

    output: Output = "block"
    pace: Pacing = "fast"
    lead: int = 2
    restarts: int = 3
    hold: float | None = None
    keep_alive: bool = False
    fps: float | None = None
    record: str | Path | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_output(self.output, self.lead, self.restarts)
        if not isinstance(self.keep_alive, bool):
            raise PlanError(f"keep_alive={self.keep_alive!r}: use True or False")
        if self.pace not in get_args(Pacing):
            raise PlanError(f"pace={self.pace!r}: use 'fast' or 'realtime'")
        if self.hold is not None and not (is_number(self.hold) and 0 < self.hold < float("inf")):
            raise PlanError(f"hold={self.hold!r}: it must be seconds above 0, or None")
        if self.fps is not None:
            number("fps", self.fps, LEAST_FPS, MOST_FPS)


class RealtimeClock:
    """Times in seconds: `now` on the clock of time.monotonic, `pts` from the beginning of the stream.

    A chunk that comes late is due at once. Those after it are due at CATCH_UP times their speed, or at once where the
    queue has dropped others, but never earlier than by the clock that the first chunk has set.
    """

    def __init__(self) -> None:
        self._first: float | None = None  # time at which pts=0 was due at first
        self._start = self._pts = 0.0  # the same now, and the last timestamp
        self._dropped = 0

    @property
    def behind(self) -> float:
        """Seconds by which chunks are due later than by the first chunk's clock."""
        return 0.0 if self._first is None else self._start - self._first

    def due(self, pts: float, now: float, dropped: int) -> float:
        """Return when the next chunk is due, `now` at the earliest. `dropped`: chunks that were dropped until now."""
        if self._first is None:
            self._first = self._start = now - pts
        # At CATCH_UP times its speed an interval between two chunks is shorter by this part of it.
        earlier = max(0.0, pts - self._pts) * (1 - 1 / CATCH_UP)
        start = self._start - earlier if dropped == self._dropped else self._first
        self._start = max(self._first, start, now - pts)
        self._pts, self._dropped = pts, dropped
        return self._start + pts
