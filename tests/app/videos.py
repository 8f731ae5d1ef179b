"""Videos to upload, made when they are needed: each frame is grey, ten steps brighter than the one before."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

BRIGHTER = 10


def grey_video(path: Path, *, frames: int, fps: int, size: tuple[int, int] = (96, 64)) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libvpx-vp9" if path.suffix == ".webm" else "libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            values = np.full((size[1], size[0], 3), (number * BRIGHTER) % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(stream.encode())
    return path
