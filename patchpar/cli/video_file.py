"""Video files: frames of a pipeline's output, or of a stream with its audio.

They exist only if they are complete, except those of streams without an end, which can be played at any time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.cli.output_files import (
    FullDisk,
    GrowingFile,
    check_can_write,
    check_suffix,
    full_disk_named,
    save,
    written_whole,
)
from patchpar.errors import PatchparError, PlanError
from patchpar.media.video_file import FORMATS, GOOD

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

AT_ONCE = {"libx264": {"tune": "zerolatency", "g": "50"}, "libvpx-vp9": {"deadline": "realtime", "lag-in-frames": "0"}}
"""For streams without an end: the encoder holds no frames back."""
FRAGMENTS = {
    "mp4": {"movflags": "empty_moov+default_base_moof", "frag_duration": "500000", "flush_packets": "1"},
    "matroska": {"cluster_time_limit": "500", "flush_packets": "1"},
    "webm": {"cluster_time_limit": "500", "flush_packets": "1"},
}
"""FFmpeg's options, in micro- and milliseconds, for a file that can be played as far as it has been written."""


def check_video(path: Path) -> None:
    """Raise PlanError if no video can be written to `path`. Call it before the run."""
    check_suffix(path, FORMATS, "video")
    check_can_write(path, "--output", "video.mp4")


def check_folder(folder: Path) -> None:
    """Create `folder` if it does not exist. Raises PlanError if frames cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--frames {folder}: the folder cannot be made ({error.strerror}); name another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"--frames {folder}: no permission to write there; name another folder")


def save_video(frames: NDArray[np.uint8], path: Path, fps: int) -> None:
    """Encode frames [F, H, W, 3] at `fps` frames per second; a complete file or none. Raises PlanError."""
    import numpy as np
    import torch

    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise PlanError(f"frames are {height} x {width}, but video codecs need even sides: save PNGs with --frames")
    with video_at(path, fps, None) as video:
        video.show(torch.from_numpy(np.ascontiguousarray(frames)), 0.0, None)


def save_frames(frames: NDArray[np.uint8], folder: Path) -> list[Path]:
    """Save frames [F, H, W, 3] as frame-0001.png and so on; return the paths."""
    from PIL import Image

    paths = [folder / f"frame-{number:04d}.png" for number in range(1, len(frames) + 1)]
    for frame, path in zip(frames, paths, strict=True):
        save(Image.fromarray(frame), path)
    return paths


class StreamVideoFile:
    """One video file, with the size of the first frames. `rate`: samples per second of its audio; None for no audio.

    `written`: where it is meanwhile. `grows`: it is written in fragments, and appears with the first. `full`: the error
    after which nothing more is written.
    """

    def __init__(
        self, path: Path, written: str | Path, fps: float, rate: int | None, grows: GrowingFile | None = None
    ) -> None:
        self.path, self._written, self._fps, self._rate, self._grows = path, written, fps, rate, grows
        self._writer: Any = None
        self.full: FullDisk | None = None

    def show(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> None:
        """Encode frames in uint8, the first at `pts` seconds, and their audio.

        Raises PlanError for odd sizes, and FullDisk, after which nothing more is written.
        """
        try:
            with full_disk_named(self.path):
                if self._writer is None:
                    self._writer = self._opened(*frames_FHWC.shape[1:3])
                self._writer.add(frames_FHWC, pts, audio_N)
        except FullDisk as error:
            self.full = error
            raise
        if self._grows is not None:
            self._grows.appear()

    def close(self) -> None:
        """Finish the file. Raises PatchparError if there was no frame; FullDisk, unless what it has can be played."""
        if self._writer is None:
            raise PatchparError("the stream ended before its first frame: there is nothing to save")
        if self.full is None:
            with full_disk_named(self.path):
                self._writer.close()
        elif self._grows is None:
            raise self.full

    def _opened(self, height: int, width: int) -> Any:
        from patchpar.media.video_encoder import VideoFormat, VideoWriter

        container, codec, audio = FORMATS[self.path.suffix.lower()]
        form = VideoFormat(
            fps=self._fps,
            height=height,
            width=width,
            rate=self._rate,
            container=container,
            video=codec,
            audio=audio,
            options=GOOD[codec] if self._grows is None else GOOD[codec] | AT_ONCE[codec],
            muxing={} if self._grows is None else FRAGMENTS[container],
        )
        return VideoWriter(str(self._written), form)


@contextmanager
def video_at(path: Path, fps: float, rate: int | None, *, is_endless: bool = False) -> Iterator[StreamVideoFile]:
    """Write a video that is moved to `path` when the `with` block ends without an error.

    `rate`: samples per second of its audio; None for no audio. `is_endless`: it is there from its first frames on, and
    can be played also if this process is killed.
    """
    if is_endless:
        with closing(GrowingFile(path)) as growing:
            endless = StreamVideoFile(path, growing.temporary, fps, rate, growing)
            yield endless
            endless.close()
        return
    with written_whole(path) as beside:
        video = StreamVideoFile(path, beside, fps, rate)
        yield video
        video.close()
