"""The images of a stream: a reference, and block by block the frames of a video that it starts from, or of poses."""

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.image_file import check_pixels, read_image_file
from patchpar.media.media_file import displayed_image, open_media, rate_of, timed_frames
from patchpar.models.files import path_of
from patchpar.stream.delivery import StreamFormat

Video = str | Path | IO[bytes] | Iterable[Any]


class VideoSource:
    """The frames of a video, [height, width, 3] in uint8 each. `frames_of`: how many a block takes, see StreamFormat.

    They are read ahead, up to two blocks, in a thread: a video that stalls holds up the blocks that need it only. The
    last block is filled up with the last frame. Raises PlanError for a video without frames.
    """

    def __init__(self, frames: Iterator[Tensor], frames_of: Callable[[int], int]) -> None:
        first = next(frames, None)
        if first is None:
            raise PlanError("video=: it has no frames")
        self._frames, self._frames_of, self._waiting = frames, frames_of, deque([first])
        self._changed = threading.Condition()
        self._is_over = False
        self._error: Exception | None = None

    def begin(self, arrived: Callable[[], object]) -> None:
        """Begin to read. `arrived`: called in the thread after each frame, and at the end."""
        threading.Thread(target=self._read, args=(arrived,), name="patchpar-video", daemon=True).start()

    def close(self) -> None:
        """Read no further. Idempotent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def is_here(self, block: int) -> bool:
        """Whether all frames of this block have been read, or the last ones, or an error: whether it can be taken."""
        return len(self._waiting) >= self._frames_of(block) or (self._is_over and not self.is_over(block))

    def is_over(self, block: int) -> bool:
        """Whether the video ends before this block, which has to be the next one."""
        return self._is_over and not self._waiting and self._error is None

    def take(self, block: int) -> Tensor:
        """Return the frames [F, height, width, 3] of a block, in uint8. Raises what reading has raised before them."""
        count = self._frames_of(block)
        with self._changed:
            taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            self._changed.notify_all()
        if len(taken) < count and self._error is not None:
            raise self._error
        return torch.stack(taken + taken[-1:] * (count - len(taken)))

    def _read(self, arrived: Callable[[], object]) -> None:
        most = 2 * self._frames_of(1)  # the first block is no larger than the others
        frames, self._frames = self._frames, iter(())  # a file is closed when this ends
        try:
            for frame in frames:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._waiting) < most or self._is_over)
                    if self._is_over:
                        return
                    self._waiting.append(frame)
                arrived()
        except Exception as error:  # noqa: BLE001  of the caller's own images; `take` raises it
            self._error = error
        self._is_over = True
        arrived()


class LiveVideo:
    """The frames of a camera, pushed one by one, [height, width, 3] in uint8 each; see VideoSource.

    A block begins when its frames are here. At most one more waits, and older ones are dropped: as frames come as fast
    as they are used, what waits would be latency for good.
    """

    def __init__(self, frames_of: Callable[[int], int]) -> None:
        self._frames_of, self._waiting = frames_of, deque[Tensor]()

    def push(self, frame: Tensor) -> None:
        self._waiting.append(frame)
        while len(self._waiting) > self._frames_of(1) + 1:  # the first block is no larger than the others
            self._waiting.popleft()

    def is_here(self, block: int) -> bool:
        return len(self._waiting) >= self._frames_of(block)

    def is_over(self, block: int) -> bool:
        """Whether the video ends before this block: never by itself."""
        return False

    def take(self, block: int) -> Tensor:
        return torch.stack([self._waiting.popleft() for _ in range(self._frames_of(block))])


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSources:
    """Where frames of blocks come from: of the `video` that a stream starts from, and of poses; None for none."""

    video: VideoSource | LiveVideo | None = None
    pose: VideoSource | None = None

    @classmethod
    def of(cls, video: Video | None, pose: Video | None, form: StreamFormat) -> "FrameSources":
        """Return the sources of what a caller gives; `video` may be "live". Raises PlanError."""
        size = form.fps, form.height, form.width
        source: VideoSource | LiveVideo | None = None
        if isinstance(video, str) and video == "live":
            source = LiveVideo(form.frames_of)
        elif video is not None:
            source = VideoSource(frames_from(video, *size), form.frames_of)
        return cls(video=source, pose=None if pose is None else VideoSource(pose_frames(pose, *size), form.frames_of))

    def is_here(self, block: int) -> bool:
        """Whether a block can begin as far as its frames go."""
        return all(source.is_here(block) for source in (self.video, self.pose) if source is not None)

    @property
    def read_ahead(self) -> list[VideoSource]:
        """Those that are read in threads of their own."""
        return [source for source in (self.video, self.pose) if isinstance(source, VideoSource)]

    def take(self, block: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the frames [F, height, width, 3] of a block in uint8, of the video and of poses. Raises PlanError."""
        video, pose = (None if source is None else source.take(block) for source in (self.video, self.pose))
        return video, pose


NO_FRAMES = FrameSources()


def frames_from(video: Video, fps: float, height: int, width: int, name: str = "video") -> Iterator[Tensor]:
    """Yield frames [height, width, 3] in uint8 of a file at `fps` frames per second, or of images as they come.

    `video`: a path, a binary file object, or images. `height`, `width`: pixels. `name`: of the argument, for errors.

    Raises PlanError for what is no video, and while it is read.
    """
    if isinstance(video, (str, Path)):
        path = path_of(video)
        if not path.is_file():
            raise PlanError(f"{name}={str(video)!r}: there is no such file")
        images = _at_rate(path, fps, f"{name}={str(path)!r}")
    elif isinstance(video, io.IOBase):
        images = _at_rate(cast(IO[bytes], video), fps, name)
    elif isinstance(video, Iterable):
        images = iter(video)
    else:
        raise PlanError(f"{name}={video!r:.80}: give a file, or images one after another")
    return (load_reference_image(image, height, width) for image in images)


def pose_frames(pose: Video, fps: float, height: int, width: int) -> Iterator[Tensor]:
    """Yield frames [height, width, 3] in uint8 of a pose video without end: black ones follow, as in Wan-S2V's code.

    `fps`: frames per second. `height`, `width`: pixels. Raises PlanError as `frames_from` does, and at once for a video
    without frames.
    """
    frames = frames_from(pose, fps, height, width, "pose")
    first = next(frames, None)
    if first is None:
        raise PlanError("pose=: it has no frames")
    return chain([first], frames, repeat(torch.zeros_like(first)))


def _at_rate(file: Path | IO[bytes], fps: float, name: str) -> Iterator[Any]:
    """The images of a file that are shown at multiples of 1 / fps seconds. `name`: for errors. Raises PlanError."""
    import av

    due, before = 0, None
    try:
        with open_media(file) as container:
            if not container.streams.video:
                raise PlanError(f"{name}: {container.format.name} has no video track")
            declared = container.streams.video[0].codec_context
            check_pixels(declared.width, declared.height, f"a frame of {name}")
            for seconds, image in _images_of(container, fps, name):
                while before is not None and due / fps < seconds - 1e-6:
                    yield before
                    due += 1
                before = image
    except av.FFmpegError as error:
        raise PlanError(f"{name} cannot be read: {error.strerror}") from error


def _images_of(container: Any, fps: float, name: str) -> Iterator[tuple[float, Any]]:
    """The images of a container, each with the seconds since the first; at last None, where the last one ends."""
    track, end = container.streams.video[0], 0.0
    for seconds, frame in timed_frames(container, fps):
        yield seconds, displayed_image(frame, track, f"a frame of {name}")
        end = seconds + (float(frame.duration * frame.time_base) if frame.duration else 1 / (rate_of(track) or fps))
    yield end, None


def load_reference_image(reference: Any, height: int, width: int) -> Tensor:
    """Return [height, width, 3] in uint8, in pixels: images upright, cropped and scaled, arrays as they are.

    Raises PlanError.
    """
    if isinstance(reference, (str, Path)):
        path = path_of(reference)
        reference = read_image_file(path, f"the reference {path}")
    if isinstance(reference, Image.Image):
        upright = ImageOps.exif_transpose(reference).convert("RGB")
        reference = np.array(ImageOps.fit(upright, (width, height)))
    try:
        # A copy, since the caller may use its buffer again; in host memory, from which images go to the ranks.
        is_array = isinstance(reference, np.ndarray)
        image = torch.tensor(reference) if is_array else torch.as_tensor(reference).to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"a reference of {type(reference).__name__} is no image: {_accepted(height, width)}") from error
    if image.dtype is not torch.uint8 or tuple(image.shape) != (height, width, 3):
        raise PlanError(
            f"a reference of shape {tuple(image.shape)} in {image.dtype} does not fit: {_accepted(height, width)}"
        )
    return image


def _accepted(height: int, width: int) -> str:
    return f"give a file, a PIL image, or {(height, width, 3)} in uint8"
