"""An uploaded video, frame by frame: checked before decoding, never held in memory as a whole."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar import PlanError
from patchpar.media.media_file import displayed_image, open_media, timed_frames

from .limits import check_size

MAX_SECONDS = 60.0  # seconds
MAX_FRAME_PIXELS = 4096 * 2304  # decoded frames are held a few at a time
MAX_RATE = 30.0  # frames per second
KINDS = (".mp4", ".webm", ".mov", ".mkv")
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"  # as PyAV names them: no playlists, which name other files


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFile:
    """A video. `seconds`, and `fps` in frames per second: as declared by the file, None where it is not."""

    path: Path
    seconds: float | None
    fps: float | None = None

    @classmethod
    def of(cls, path: str | Path | None) -> "VideoFile":
        """Check an uploaded file. Raises PlanError if it is no video, too large or too long."""
        if path is None:
            raise PlanError("there is no video: choose one")
        check_size(path)
        import av

        try:
            with open_media(Path(path)) as container:
                return cls._inspect(container, Path(path))
        except av.FFmpegError as error:
            raise PlanError(f"the file cannot be read as a video: use {', '.join(KINDS)} ({error.strerror})") from error

    @classmethod
    def _inspect(cls, container: Any, path: Path) -> "VideoFile":
        if container.format.name not in FORMATS or not container.streams.video:
            raise PlanError(f"the file cannot be read as a video: use {', '.join(KINDS)}")
        stream = container.streams.video[0]
        _check_frame(stream.codec_context.width, stream.codec_context.height)
        seconds = None if container.duration is None else container.duration / 1e6
        if seconds is not None and seconds > MAX_SECONDS:
            raise PlanError(f"the video has {seconds:.0f} s: at most {MAX_SECONDS:.0f} s are taken, so cut it")
        fps = stream.average_rate
        return cls(path=path, seconds=seconds, fps=float(fps) if fps else None)

    def in_memory(self) -> io.BytesIO:
        """Its bytes as a file object. Raises PlanError if it was deleted meanwhile."""
        check_size(self.path)
        return io.BytesIO(self.path.read_bytes())

    def expected_frames(self, rate: float) -> int:
        """Number of frames at `rate` per second; 0 if unknown."""
        return 0 if self.seconds is None else math.ceil(self.seconds * rate)

    def frame_rate(self, rate: float) -> float:
        """Frames per second that `frames` yields: `rate`, at most that of the file."""
        return rate if self.fps is None else min(rate, self.fps)

    def frames(self, rate: float) -> Iterator[Any]:
        """PIL images, at most `rate` per second of video. Raises PlanError where the file ends early."""
        import av

        check_size(self.path)
        taken = 0
        try:
            with open_media(self.path) as container:
                track = container.streams.video[0]
                for seconds, frame in timed_frames(container, MAX_RATE):
                    if seconds >= MAX_SECONDS:
                        return
                    if seconds * rate >= taken - 1e-6:
                        _check_frame(frame.width, frame.height)
                        taken = math.floor(seconds * rate + 1e-6) + 1
                        yield displayed_image(frame, track, "a frame")
        except av.FFmpegError as error:
            raise PlanError(f"the video ends early, after {taken} frames: {error.strerror}") from error


def _check_frame(width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS:
        limit = f"{MAX_FRAME_PIXELS / 1e6:.0f} million pixels"
        raise PlanError(f"a frame has {width} x {height} pixels: at most {limit} are taken, so make the video smaller")
