"""Running a stream until its end or ctrl-C: output of frames, statistics, report."""

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

    from patchpar.stream.base_session import BaseSession


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
    """How a stream ended: normally, by ctrl-C, by a signal, or by an error.

    `seconds`: length of the output. `code`: the exit code after a signal, 0 without one.
    """

    seconds: float
    code: int = 0
    error: Exception | None = None


def show_all(
    parts: Iterable[TimedFrames],
    session: BaseSession[Any, Any, Any],
    screens: Sequence[FrameOutput],
    meter: ProgressMeter,
    say: Callable[[str], None],
    fps: float,
) -> StreamEnding:
    """Send all parts to all `screens`, until the stream ends by itself, by a signal or by an error."""
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
    meter: ProgressMeter
    ending: StreamEnding
    dropped: int
    outputs: Sequence[Path]

    def tell(self, as_json: bool, **more: Any) -> None:
        """Print the report on stdout. `more`: further fields of the JSON."""
        if as_json:
            print_json({**self._as_dict(), **more})
            return
        typer.echo(self.plan)
        lost = f", {self.dropped} dropped" if self.dropped else ""
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
        """Raise the error of the stream, or Exit after a signal; ctrl-C is a normal end if the stream is endless."""
        if self.ending.error is not None:
            raise self.ending.error
        if self.ending.code and not (is_endless and self.ending.code == INTERRUPTED):
            raise typer.Exit(self.ending.code)
