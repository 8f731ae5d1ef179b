"""A stream from its first frame to its last, or to ctrl-C: shown, counted, reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import typer

from patchpar.cli.console import print_json
from patchpar.cli.shutdown import INTERRUPTED
from patchpar.cli.stream.progress_line import ProgressMeter

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class FrameOutput(Protocol):
    """Where frames are shown."""

    def show(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> None:
        """Frames in uint8, due at `pts` seconds from the beginning, and their audio."""


class ReportedSession(Protocol):
    """What the line says of a stream."""

    @property
    def in_flight(self) -> int:
        """Blocks or images under way."""

    @property
    def dropped(self) -> int:
        """Those that nobody has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFrames:
    """Some frames of a stream, due at `pts` seconds. `frames` is None where the last one is held."""

    frames: Tensor | None
    pts: float
    audio: Tensor | None
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnding:
    """How a stream ended: by itself, by ctrl-C, by a signal that asked for it, or by an error.

    `seconds`: of video that have come out. `code`: the exit code after a signal, 0 without one.
    """

    seconds: float
    code: int = 0
    error: Exception | None = None


def show_all(
    parts: Iterable[TimedFrames],
    session: ReportedSession,
    screens: Sequence[FrameOutput],
    meter: ProgressMeter,
    say: Callable[[str], None],
    fps: float,
) -> StreamEnding:
    """Until the stream ends. What has come out by then is shown whole, whatever ends it."""
    seconds = 0.0
    try:
        for part in parts:
            if part.frames is not None:
                for screen in screens:
                    screen.show(part.frames, part.pts, part.audio)
                seconds = part.pts + len(part.frames) / fps
                meter.add(len(part.frames), session.in_flight)
            say(meter.line(part.status, session.in_flight, seconds))
    except KeyboardInterrupt:
        return StreamEnding(seconds=seconds, code=INTERRUPTED)
    except SystemExit as ending:
        return StreamEnding(seconds=seconds, code=int(ending.code or 0))
    except Exception as error:
        if not meter.frames:
            raise
        return StreamEnding(seconds=seconds, error=error)
    return StreamEnding(seconds=seconds)


def paced(parts: Iterable[TimedFrames], clock: Any = time) -> Iterator[TimedFrames]:
    """Each when it is due. After one that was late the others keep their distance from it."""
    began: float | None = None
    for part in parts:
        now = clock.monotonic()
        if began is None or now > began + part.pts:
            began = now - part.pts
        clock.sleep(max(0.0, began + part.pts - now))
        yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """What is said of a stream at its end. `plan`: who did what, in words."""

    plan: str
    meter: ProgressMeter
    ending: StreamEnding
    dropped: int
    outputs: Sequence[Path]

    def tell(self, as_json: bool, **more: Any) -> None:
        """Print it on stdout; `more` for those who read JSON."""
        if as_json:
            print_json({**self._as_dict(), **more})
            return
        typer.echo(self.plan)
        lost = f", {self.dropped} lost" if self.dropped else ""
        typer.echo(f"{self.meter}; {self.ending.seconds:.1f} s{lost}")
        for path in self.outputs:
            typer.echo(f"saved {path}")

    def _as_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            **self.meter.as_dict(),
            "seconds": self.ending.seconds,
            "dropped": self.dropped,
            "outputs": [str(path) for path in self.outputs],
        }

    def finish(self, *, is_endless: bool) -> None:
        """Leave as it has ended: raise its error, or Exit if it was cut short, as by ctrl-C unless it had no end."""
        if self.ending.error is not None:
            raise self.ending.error
        if self.ending.code and not (is_endless and self.ending.code == INTERRUPTED):
            raise typer.Exit(self.ending.code)
