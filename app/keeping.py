"""A stream kept as a film while it is shown, to be saved when it is over."""

from pathlib import Path
from typing import Any

from patchpar.stream.web.mp4_fragments import Mp4Fragment, Mp4Header
from patchpar.stream.web.video_encoder import VideoFormat, VideoWriter

NAME = "stream.mp4"
QUICK = {"preset": "veryfast", "crf": "18"}  # the workers want the cores


class SavedVideo:
    """A file of MP4 at `path`, made of pictures or of fragments. `film` is where it is, None while there is nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: VideoWriter | None = None
        self._count = 0

    @property
    def film(self) -> Path | None:
        """The file, when it has been closed."""
        return self._path if self._count and self._writer is None else None

    def add(self, picture: Any, fps: float) -> None:
        """A PIL picture, as large as all before it; `fps` of them are shown in a second."""
        import numpy as np
        import torch

        if self._writer is None:
            form = VideoFormat(fps=fps, height=picture.height, width=picture.width, options=QUICK)
            self._writer = VideoWriter(str(self._path), form)
        frame_HWC = torch.from_numpy(np.array(picture.convert("RGB")))
        self._writer.add(frame_HWC[None], self._count / fps)
        self._count += 1

    def append(self, head: Mp4Header, fragments: list[Mp4Fragment]) -> None:
        """Fragments, which are the film as they are."""
        with self._path.open("ab" if self._count else "wb") as file:
            file.writelines(([] if self._count else [head.data]) + [fragment.data for fragment in fragments])
        self._count += len(fragments)

    def close(self) -> None:
        """Finish the file. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
