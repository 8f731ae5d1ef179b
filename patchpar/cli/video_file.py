"""Video files: frames of a pipeline's output, encoded by PyAV into complete files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.cli.image_files import save
from patchpar.cli.output_files import check_can_write, written_whole
from patchpar.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CODECS = {".mp4": "libx264", ".mkv": "libx264", ".webm": "libvpx-vp9"}
GOOD = {"libx264": {"crf": "16"}, "libvpx-vp9": {"crf": "24", "b:v": "0"}}  # quality, where 0 is lossless


def check_video(path: Path) -> None:
    """Raise PlanError if no video can be written to `path`. Call it before the run."""
    if path.suffix.lower() not in CODECS:
        known = ", ".join(CODECS)
        raise PlanError(f"cannot write {path}: the suffix {path.suffix!r} names no video format; use one of {known}")
    check_can_write(path, "--output", "video.mp4")


def check_folder(folder: Path) -> None:
    """Create `folder` if it does not exist. Raises PlanError if frames cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--frames {folder}: the folder cannot be created: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"--frames {folder}: no permission to write there")


def frames_of(output: Any) -> NDArray[np.uint8] | None:
    """Return frames [F, H, W, 3] of a pipeline's output; None on a rank without a result. Raises PlanError."""
    if not hasattr(output, "frames"):
        raise PlanError(
            f"this model returns {type(output).__name__}, which has no frames: `patchpar generate` generates images"
        )
    if output.frames is None:
        return None
    import numpy as np

    first = output.frames[0]
    if hasattr(first, "detach"):  # a tensor [F, 3, H, W]
        first = first.detach().float().cpu().permute(0, 2, 3, 1).numpy()
    frames = np.stack([np.asarray(frame) for frame in first])
    if frames.dtype == np.uint8:
        return frames
    found: NDArray[np.uint8] = (frames.astype(np.float32).clip(0, 1) * 255).round().astype(np.uint8)
    return found


def save_video(frames: NDArray[np.uint8], path: Path, fps: int) -> None:
    """Encode frames [F, H, W, 3] at `fps` frames per second; a complete file or none. Raises PlanError."""
    with written_whole(path) as temporary:
        _encode(frames, temporary, fps)


def _encode(frames: NDArray[np.uint8], path: Path, fps: int) -> None:
    import av

    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise PlanError(f"frames are {height} x {width}, but video codecs need even sides: save PNGs with --frames")
    codec = CODECS[path.suffix.lower()]
    with av.open(str(path), "w") as container:
        try:
            stream = container.add_stream(codec, rate=fps, options=GOOD[codec])
        except av.FFmpegError as error:
            raise PlanError(f"this PyAV cannot encode {codec} for {path.suffix} files: {error}") from error
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def save_frames(frames: NDArray[np.uint8], folder: Path) -> list[Path]:
    """Save frames [F, H, W, 3] as frame-0001.png and so on; return the paths."""
    from PIL import Image

    paths = [folder / f"frame-{number:04d}.png" for number in range(1, len(frames) + 1)]
    for frame, path in zip(frames, paths, strict=True):
        save(Image.fromarray(frame), path)
    return paths
