"""Videos that a server keeps: a file and a thumbnail of each, in a folder that ends with the server."""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchpar.media.video_file import write_video
from patchpar.serving.generated import GeneratedVideo
from patchpar.serving.partial_images import ImageFigures

THUMBNAIL = 256
"""Pixels of the longer side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVideo:
    """A video's files, and figures of its call. `size`: width and height in pixels. `fps`: frames per second."""

    file: Path
    thumbnail: Path
    frames: int
    fps: int
    size: tuple[int, int]
    figures: ImageFigures
    reason: str

    @property
    def facts(self) -> dict[str, Any]:
        """What JSON can hold of it: all but where its files are."""
        return {
            "frames": self.frames,
            "fps": self.fps,
            "size": list(self.size),
            "figures": asdict(self.figures),
            "reason": self.reason,
        }

    @property
    def seconds(self) -> float:
        """The length of the video."""
        return self.frames / self.fps

    @property
    def bytes(self) -> int:
        """What the video takes in its folder."""
        return self.file.stat().st_size

    def delete(self) -> None:
        """Delete the files."""
        for path in (self.file, self.thumbnail):
            path.unlink(missing_ok=True)


class VideoFiles:
    """A folder of videos. None makes one of its own, which no other user can read and `close` deletes."""

    def __init__(self, folder: Path | None) -> None:
        self._given, self._own = folder, None if folder else ""

    @property
    def folder(self) -> Path:
        """The folder, which is made when it is first asked for."""
        if self._given is not None:
            return self._given
        if not self._own:
            self._own = tempfile.mkdtemp(prefix="patchpar-videos-")
        return Path(self._own)

    def store(self, name: str, video: GeneratedVideo, fps: int) -> StoredVideo:
        """Encode a video at `fps` frames per second into `name`.mp4. Raises PlanError and PyAV's errors."""
        from PIL import Image

        file, beside = self.folder / f"{name}.mp4", self.folder / f".{name}.mp4"
        thumbnail = self.folder / f"{name}.webp"
        try:
            write_video(video.frames, str(beside), fps)
            image: Any = Image.fromarray(video.frames[0])
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            image.save(thumbnail, "WEBP")
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
        count, height, width = video.frames.shape[:3]
        return StoredVideo(
            file=file,
            thumbnail=thumbnail,
            frames=count,
            fps=fps,
            size=(width, height),
            figures=video.figures,
            reason=video.reason,
        )

    def adopt(self, name: str, source: Path, facts: Mapping[str, Any]) -> StoredVideo:
        """Store a video whose files are in the folder `source`. Raises OSError, KeyError, TypeError and ValueError."""
        width, height = map(int, facts["size"])
        figures = ImageFigures.from_facts(facts["figures"])
        file, thumbnail = (Path(shutil.copy2(source / f"{name}.{kind}", self.folder)) for kind in ("mp4", "webp"))
        return StoredVideo(
            file=file,
            thumbnail=thumbnail,
            frames=int(facts["frames"]),
            fps=int(facts["fps"]),
            size=(width, height),
            figures=figures,
            reason=str(facts["reason"]),
        )

    def close(self) -> None:
        """Delete the folder, if it is an own one. Idempotent."""
        if self._own:
            with suppress(OSError):
                shutil.rmtree(self._own)
            self._own = ""
