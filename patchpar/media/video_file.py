"""Frames of a pipeline's output as a video file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchpar.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = {
    ".mp4": ("mp4", "libx264", "aac"),
    ".mkv": ("matroska", "libx264", "aac"),
    ".webm": ("webm", "libvpx-vp9", "libopus"),
}
"""FFmpeg's names of container, video codec and audio codec, by suffix."""
GOOD = {"libx264": {"crf": "16"}, "libvpx-vp9": {"crf": "24", "b:v": "0"}}  # quality, where 0 is lossless


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
    return (frames.astype(np.float32).clip(0, 1) * 255).round().astype(np.uint8)


def write_video(frames: NDArray[np.uint8], target: str, fps: float, suffix: str = ".mp4") -> None:
    """Encode frames [F, H, W, 3] at `fps` frames per second into a file. Raises PlanError for odd sides."""
    import numpy as np
    import torch

    from patchpar.media.video_encoder import VideoFormat, VideoWriter

    height, width = frames.shape[1:3]
    container, codec, _ = FORMATS[suffix]
    form = VideoFormat(fps=fps, height=height, width=width, container=container, video=codec, options=GOOD[codec])
    writer = VideoWriter(target, form)
    writer.add(torch.from_numpy(np.ascontiguousarray(frames)), 0.0)
    writer.close()
