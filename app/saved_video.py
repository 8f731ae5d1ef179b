"""Saves a stream as a video file while it is shown."""

from pathlib import Path
from typing import Any

from patchpar.media.mp4_fragments import Mp4Fragment, Mp4Header
from patchpar.media.video_encoder import VideoFormat, VideoWriter

NAME = "stream.mp4"
QUICK = {"preset": "veryfast", "crf": "18"}  # the workers need the cores


class SavedVideo:
    """An MP4 file at `path`, made of images or of fragments."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: VideoWriter | None = None
        self._count = 0

    @property
    def video(self) -> Path | None:
        """The path once the file is closed; None if it is empty or still open."""
        return self._path if self._count and self._writer is None else None

    def add(self, image: Any, fps: float) -> None:
        """Append a PIL image of the same size as all before it, at `fps` frames per second."""
        import numpy as np
        import torch

        if self._writer is None:
            form = VideoFormat(fps=fps, height=image.height, width=image.width, options=QUICK)
            self._writer = VideoWriter(str(self._path), form)
        frame_HWC = torch.from_numpy(np.array(image.convert("RGB")))
        self._writer.add(frame_HWC[None], self._count / fps)
        self._count += 1

    def append(self, head: Mp4Header, fragments: list[Mp4Fragment]) -> None:
        """Append MP4 fragments as they are."""
        with self._path.open("ab" if self._count else "wb") as file:
            file.writelines(([] if self._count else [head.data]) + [fragment.data for fragment in fragments])
        self._count += len(fragments)

    def close(self) -> None:
        """Finish the file. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
