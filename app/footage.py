"""A film that was uploaded, frame by frame: looked at before it is decoded, and never held whole."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from patchpar import PlanError

from .limits import check_size

LONGEST = 60.0  # seconds
MOST_FRAME_PIXELS = 4096 * 2304  # decoded frames are held a few at a time
MOST_RATE = 30.0  # frames taken from a second
KINDS = (".mp4", ".webm", ".mov", ".mkv")
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"  # as PyAV names them: no playlists, which name other files


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFile:
    """A film. `seconds` and `fps`, frames per second: as the file itself says, None where it does not."""

    path: Path
    seconds: float | None
    fps: float | None = None

    @classmethod
    def of(cls, path: str | Path | None) -> "VideoFile":
        """Look at an uploaded file. Raises PlanError for one that is no film, too large or too long."""
        if path is None:
            raise PlanError("there is no film: choose one")
        check_size(path)
        import av

        try:
            with av.open(str(path)) as container:
                return cls._seen(container, Path(path))
        except av.FFmpegError as error:
            raise PlanError(f"the file is no film that can be read: use {', '.join(KINDS)}") from error

    @classmethod
    def _seen(cls, container: Any, path: Path) -> "VideoFile":
        if container.format.name not in FORMATS or not container.streams.video:
            raise PlanError(f"the file is no film that can be read: use {', '.join(KINDS)}")
        stream = container.streams.video[0]
        _check_frame(stream.codec_context.width, stream.codec_context.height)
        seconds = None if container.duration is None else container.duration / 1e6
        if seconds is not None and seconds > LONGEST:
            raise PlanError(f"the film has {seconds:.0f} s: at most {LONGEST:.0f} s are taken, so cut it")
        fps = stream.average_rate
        return cls(path=path, seconds=seconds, fps=float(fps) if fps else None)

    def expected(self, rate: float) -> int:
        """How many frames `rate` a second makes; 0 where nobody knows."""
        return 0 if self.seconds is None else math.ceil(self.seconds * rate)

    def pace(self, rate: float) -> float:
        """How many frames of a second `frames` finds: `rate`, or as many as there are."""
        return rate if self.fps is None else min(rate, self.fps)

    def frames(self, rate: float) -> Iterator[Any]:
        """PIL pictures, `rate` for a second of film or as many as it has. Raises PlanError where the file breaks."""
        import av

        check_size(self.path)
        taken = 0
        try:
            with av.open(str(self.path)) as container:
                for seconds, frame in _timed(container):
                    if seconds >= LONGEST:
                        return
                    if seconds * rate >= taken - 1e-6:
                        _check_frame(frame.width, frame.height)
                        taken = math.floor(seconds * rate + 1e-6) + 1
                        yield _upright(frame)
        except av.FFmpegError as error:
            raise PlanError(f"the film breaks off after {taken} frames: {error}") from error


def _timed(container: Any) -> Iterator[tuple[float, Any]]:
    """Frames, each with the seconds since the first."""
    stream = container.streams.video[0]
    apart = 1 / float(stream.average_rate or MOST_RATE)
    first = None
    for number, frame in zip(count(), container.decode(stream)):
        seconds = number * apart if frame.time is None else float(frame.time)
        first = seconds if first is None else first
        yield seconds - first, frame


def _upright(frame: Any) -> Any:
    """As a player shows it: telephones film as they are held, and say how to turn it."""
    turned = getattr(frame, "rotation", 0)
    picture = frame.to_image()
    return picture.rotate(turned, expand=True) if turned else picture


def _check_frame(width: int, height: int) -> None:
    if width * height > MOST_FRAME_PIXELS:
        most = f"{MOST_FRAME_PIXELS / 1e6:.0f} million pixels"
        raise PlanError(f"a frame has {width} x {height} pixels: at most {most} are taken, so make the film smaller")
