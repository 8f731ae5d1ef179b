"""Running a stream until its end or ctrl-C: output of frames, statistics, report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import typer
from rich.console import Console

from patchpar.cli.console import print_json
from patchpar.cli.output_files import FullDisk
from patchpar.cli.video_file import StreamVideoFile, video_at
from patchpar.launch.shutdown import INTERRUPTED, abandon_computation, exit_code
from patchpar.web.server import HOME, is_local

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from patchpar.cli.stream.flags import StreamFlags
    from patchpar.cli.stream.ranks import StreamRanks
    from patchpar.stream.base_session import BaseSession
    from patchpar.web.page_input import PageInputs
    from patchpar.web.viewer import ImageScreen, VideoScreen

WINDOW = 3.0
"""Seconds over which the rate on the status line is measured."""


class ProgressMeter:
    """Counts output frames. Time starts at construction."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._recent: deque[tuple[float, int]] = deque()  # (when, frames)
        self._first: tuple[float, int] | None = None
        self._last = 0.0
        self.frames = self.most_under_way = 0

    def add(self, frames: int, under_way: int) -> None:
        """Count output frames. `under_way`: blocks in flight."""
        now = self._clock() - self._began
        self._first = self._first or (now, frames)
        self._last, self.frames = now, self.frames + frames
        self.most_under_way = max(self.most_under_way, under_way)
        self._recent.append((now, frames))
        while self._recent[0][0] < now - WINDOW and len(self._recent) > 2:
            self._recent.popleft()

    @property
    def first_frame(self) -> float | None:
        """Seconds to the first frame."""
        return None if self._first is None else self._first[0]

    @property
    def fps(self) -> float | None:
        """Frames per second after the first block; None before the second."""
        if self._first is None or self._last <= self._first[0]:
            return None
        return (self.frames - self._first[1]) / (self._last - self._first[0])

    def line(self, status: str, under_way: int, seconds: float) -> str:
        """Return the status line. `seconds`: length of the output so far."""
        words = [f"{int(seconds) // 60}:{seconds % 60:04.1f}", f"{self._rate():.1f} frames/s"]
        if self.first_frame is not None:
            words.append(f"first frame after {self.first_frame:.2f} s")
        words.append(f"{under_way} in flight")
        return ", ".join(words if status == "running" else [*words, status])

    def _rate(self) -> float:
        """Frames per second in the last WINDOW seconds."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return 0.0
        frames = sum(count for _, count in self._recent) - self._recent[0][1]
        return frames / (self._recent[-1][0] - self._recent[0][0])

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics of the whole stream."""
        return {
            "frames": self.frames,
            "fps": self.fps,
            "first_frame": self.first_frame,
            "most_under_way": self.most_under_way,
        }

    def __str__(self) -> str:
        if self.first_frame is None:
            return "no frame came out"
        rate = "" if self.fps is None else f" at {self.fps:.1f} frames/s"
        return f"{self.frames} frames{rate}, the first after {self.first_frame:.2f} s"


@contextmanager
def living_line(first: str) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr that can be updated; nothing is shown if stderr is no terminal."""
    with Console(stderr=True).status(first) as line:
        yield line.update


class FrameOutput(Protocol):
    """An output for frames."""

    def show(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> None:
        """Output frames in uint8, the first at `pts` seconds from the beginning, and their audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFrames:
    """Frames [F, H, W, 3] of a stream at `pts` seconds; None while the last frame is held. `audio`: [N] or None."""

    frames: Tensor | None
    pts: float
    audio: Tensor | None
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnding:
    """How a stream of `seconds` ended: by itself, by ctrl-C or a signal (`code` is the exit code), or by `error`."""

    seconds: float
    code: int = 0
    error: Exception | None = None


def show_all(
    parts: Iterable[TimedFrames],
    session: BaseSession[Any, Any],
    screens: Sequence[FrameOutput],
    meter: ProgressMeter,
    print_line: Callable[[str], None],
    fps: float,
) -> StreamEnding:
    """Send all parts to all `screens`, until the stream ends by itself, by a signal or by an error.

    A file whose disk is full is an error at the end, where others still watch. Before the first frame there is nothing
    to keep: then the signal or the error is raised.
    """
    seconds, left, full = 0.0, list(screens), None
    try:
        for part in parts:
            if part.frames is not None:
                for screen in tuple(left):
                    full = _output(screen, part, left) or full
                seconds = part.pts + len(part.frames) / fps
                meter.add(len(part.frames), session.in_flight)
            print_line(meter.line(part.status, session.in_flight, seconds))
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not meter.frames:
            raise
        if isinstance(error, Exception):
            return StreamEnding(seconds=seconds, error=error)
        return StreamEnding(seconds=seconds, code=exit_code(error), error=full)
    return StreamEnding(seconds=seconds, error=full)


def _output(screen: FrameOutput, part: TimedFrames, left: list[FrameOutput]) -> FullDisk | None:
    """Send frames to a screen. One whose disk is full is not `left` then; raises FullDisk if it is the last."""
    try:
        if part.frames is not None:
            screen.show(part.frames, part.pts, part.audio)
    except FullDisk as error:
        if len(left) == 1:
            raise
        left.remove(screen)
        typer.echo(f"{error}. The stream goes on without it", err=True)
        return error
    return None


def paced(parts: Iterable[TimedFrames], clock: Any = time) -> Iterator[TimedFrames]:
    """Yield each part when it is due. A late part delays all later ones by as much."""
    began: float | None = None
    for part in parts:
        now = clock.monotonic()
        if began is None or now > began + part.pts:
            began = now - part.pts
        clock.sleep(max(0.0, began + part.pts - now))
        yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """The report at the end of a stream. `plan`: assignment of steps to ranks, as text."""

    plan: str
    ranks: StreamRanks
    meter: ProgressMeter
    ending: StreamEnding
    dropped: int
    outputs: Sequence[Path]

    def write(self, as_json: bool, **more: Any) -> None:
        """Print the report on stdout. `more`: further fields of the JSON."""
        if as_json:
            facts = {"plan": self.plan, **self.meter.as_dict(), "seconds": self.ending.seconds, "dropped": self.dropped}
            print_json({**facts, "outputs": [str(path) for path in self.outputs], **more})
            return
        typer.echo(self.plan)
        lost = f", {self.dropped} dropped" if self.dropped else ""
        typer.echo(f"{self.meter}; {self.ending.seconds:.1f} s{lost}")
        for path in self.outputs:
            typer.echo(f"saved {path}")

    def finish(self, *, is_endless: bool) -> None:
        """Raise the error of the stream, or Exit after a signal; ctrl-C is a normal end if the stream is endless.

        Exits if a step still computes in this process.
        """
        if self.ending.error is not None:
            raise self.ending.error
        code = 0 if is_endless and self.ending.code == INTERRUPTED else self.ending.code
        if self.ending.code and self.ranks.is_computing:
            abandon_computation(code, self.ending.code - 128)
        if code:
            raise typer.Exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOutputs:
    """Live pages, served from the beginning, and a file, begun when ranks are ready and complete at the end.

    Frames have `fps`, and their audio `rate` samples per second; None for no audio.
    """

    request: StreamFlags
    fps: float
    rate: int | None
    live: tuple[ImageScreen | VideoScreen, ...]
    videos: tuple[StreamVideoFile, ...] = ()

    @classmethod
    def pages(
        cls, request: StreamFlags, fps: float, rate: int | None, stack: ExitStack, inputs: PageInputs
    ) -> FrameOutputs:
        """Serve the requested pages until `stack` is closed. `inputs`: what that of --ws may send.

        Raises PlanError for a port that is not free.
        """
        live = _live(request, fps, rate, stack, inputs) if request.is_live else ()
        return cls(request=request, fps=fps, rate=rate, live=live)

    def with_file(self, stack: ExitStack) -> FrameOutputs:
        """Return these with the requested file, which is complete when `stack` is closed without an error."""
        output = self.request.output
        if output is None:
            return self
        video = video_at(output, self.fps, self.rate, is_endless=self.request.is_endless)
        return replace(self, videos=(stack.enter_context(video),))

    @property
    def saved(self) -> list[Path]:
        """The path of the file, unless its disk is full."""
        return [video.path for video in self.videos if video.full is None]

    @property
    def all(self) -> list[FrameOutput]:
        """All outputs. Each gets every frame."""
        return [*self.live, *self.videos]

    def status_line(self, print_line: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that reports a status line to `print_line` and to the pages."""

        def show(line: str) -> None:
            print_line(line)
            for screen in self.live:
                screen.page.status = line

        return show


def _live(
    request: StreamFlags, fps: float, rate: int | None, stack: ExitStack, inputs: PageInputs
) -> tuple[ImageScreen | VideoScreen, ...]:
    from patchpar.web.viewer import ImageScreen, VideoScreen

    host = request.host or HOME
    screens: list[ImageScreen | VideoScreen] = []
    if request.mjpeg is not None:
        screens.append(stack.enter_context(closing(ImageScreen(host, request.mjpeg, fps))))
    if request.ws is not None:
        video = VideoScreen(host, request.ws, fps, rate, inputs, webrtc=request.webrtc)
        screens.append(stack.enter_context(closing(video)))
    for screen in screens:
        screen.open()
        typer.echo(f"watch at {screen.page.url}", err=True)
    if not is_local(host):
        what = "watch, and send audio or images" if inputs.names else "watch"
        typer.echo(f"{host}: everyone who can reach this machine can {what}", err=True)
    return tuple(screens)
