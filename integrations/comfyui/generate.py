"""Images from a pipeline of diffusers on several devices, or from a server, as ComfyUI's IMAGE [B, H, W, 3]."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

POLL = 0.1
"""Seconds between two looks at progress and interruption."""


def as_images(images: Iterable[Image.Image]) -> Tensor:
    """Return [B, H, W, 3] from 0 to 1."""
    return torch.stack([torch.from_numpy(np.asarray(each.convert("RGB"), dtype=np.float32) / 255) for each in images])


def from_pipeline(
    pipe: Any, call: dict[str, Any], *, progress: Callable[[int, int], object], check: Callable[[], object]
) -> Tensor:
    """Return the images [B, H, W, 3] of a call of a ParallelPipeline.

    `progress(step, steps)` is called after steps; `check` raises what ends the job, which is cancelled then.
    """
    job, reported = pipe.submit(**call), -1
    try:
        while not job.wait(POLL):
            check()
            now = job.progress
            if now.step != reported and now.steps:
                reported = now.step
                progress(now.step, now.steps)
    except BaseException:
        job.cancel()
        raise
    return as_images(job.result().images)


def from_server(client: Any, call: dict[str, Any], extra: dict[str, Any]) -> Tensor:
    """Return the images [B, H, W, 3] of a request to `patchpar serve`, by OpenAI's client."""
    answer = client.images.generate(**call, extra_body=extra)
    return as_images(Image.open(io.BytesIO(base64.b64decode(each.b64_json))) for each in answer.data)
