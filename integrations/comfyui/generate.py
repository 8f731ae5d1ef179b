"""Images from a pipeline of diffusers on several devices, or from a server, as ComfyUI's IMAGE [B, H, W, 3]."""

from __future__ import annotations

import base64
import io
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

POLL = 0.1
"""Seconds between two looks at progress and interruption."""
ANSWER = 30.0
"""Seconds in which a server answers a look at a job."""
ENDS = ("completed", "failed", "cancelled")


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
    found = getattr(job.result(), "images", None)
    if found is None:
        raise ValueError("this pipeline makes no images: load one that does, from text")
    return as_images(found)


def from_server(
    client: Any,
    call: dict[str, Any],
    extra: dict[str, Any],
    *,
    progress: Callable[[int, int], object],
    check: Callable[[], object],
) -> Tensor:
    """Return the images [B, H, W, 3] of a job of `patchpar serve`, by OpenAI's client.

    `progress`, `check`: see `from_pipeline`. The server keeps nothing of the job afterwards. Raises RuntimeError with
    the server's reason, and what the client raises.
    """
    from openai import OpenAIError

    client = client.with_options(timeout=ANSWER)
    sent_once = {"Idempotency-Key": uuid.uuid4().hex}  # the client sends a request again that got no answer
    begun = client.images.generate(**call, extra_body=extra, extra_query={"async": "true"}, extra_headers=sent_once)
    path, reported = f"/jobs/{begun.id}", -1
    try:
        while (job := client.get(path, cast_to=object))["status"] not in ENDS:
            check()
            if job["step"] != reported and job["steps"]:
                reported = job["step"]
                progress(job["step"], job["steps"])
            time.sleep(POLL)
    finally:
        with suppress(OpenAIError):  # what has ended the loop says more than a server that is gone by now
            client.delete(path, cast_to=object)
    if job["status"] != "completed":
        raise RuntimeError(f"the server: {job['error']['message']}")
    files = (io.BytesIO(base64.b64decode(each["b64_json"])) for each in job["result"]["data"])
    return as_images(Image.open(file, formats=("PNG",)) for file in files)  # of all formats one has Ghostscript run it


def key_in(text: str, url: str) -> str:
    """Return the first key of a file as `patchpar serve` reads it: lines that begin with # are none.

    One of these has to be the URL of the server that the key is for: a workflow of somebody else names a URL and a file
    too, and would get whatever is in it. Raises ValueError without this line, and without a key.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    notes = {line.lstrip("# ").rstrip("/") for line in lines if line.startswith("#")}
    if url.rstrip("/") not in notes:
        raise ValueError(
            f"key_file: it does not say that its key is for {url}, and a workflow does not choose who gets it: if you "
            f"trust that server, add the line `# {url}` to the file"
        )
    found = [line for line in lines if not line.startswith("#")]
    if not found:
        raise ValueError("key_file: there is no key in it; write one on a line of its own")
    return found[0]
