"""Writing a stream's frames and audio to a file, which exists only if it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.cli.output_files import written_whole
from patchpar.cli.video_file import CODECS, GOOD
from patchpar.errors import PatchparError

if TYPE_CHECKING:
    from torch import Tensor

CONTAINERS = {".mp4": ("mp4", "aac"), ".mkv": ("matroska", "aac"), ".webm": ("webm", "libopus")}


class StreamVideoFile:
    """One video file, with the size of the first frames."""

    def __init__(self, path: Path, suffix: str, fps: float, rate: int | None) -> None:
        self._path, self._suffix, self._fps, self._rate = path, suffix, fps, rate
        self._writer: Any = None

    def show(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> None:
        """Encode frames in uint8, the first at `pts` seconds, and their audio. Raises PlanError for odd sizes."""
        if self._writer is None:
            self._writer = self._opened(*frames_FHWC.shape[1:3])
        self._writer.add(frames_FHWC, pts, audio_N)

    def close(self) -> None:
        """Finish the file. Raises PatchparError if there was no frame."""
        if self._writer is None:
            raise PatchparError("the stream ended before its first frame: there is nothing to save")
        self._writer.close()

    def _opened(self, height: int, width: int) -> Any:
        from patchpar.stream.web.video_encoder import VideoFormat, VideoWriter

        container, audio = CONTAINERS[self._suffix]
        codec = CODECS[self._suffix]
        form = VideoFormat(
            fps=self._fps,
            height=height,
            width=width,
            rate=self._rate,
            container=container,
            video=codec,
            audio=audio,
            options=GOOD[codec],
        )
        return VideoWriter(str(self._path), form)


@contextmanager
def video_at(path: Path, fps: float, rate: int | None) -> Iterator[StreamVideoFile]:
    """Write a video that is moved to `path` when the `with` block ends without an error."""
    with written_whole(path) as beside:
        video = StreamVideoFile(beside, path.suffix.lower(), fps, rate)
        yield video
        video.close()
