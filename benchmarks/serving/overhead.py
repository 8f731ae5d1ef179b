"""Time of a request beside its call: HTTP, queue, checks, encoding of the image; and how long it waits when idle."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import httpx

from patchpar.serving.generation import ImageGenerator
from patchpar.serving.server import ImageServer
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings

BODY = {"prompt": "a red house", "size": "128x128", "num_inference_steps": 4, "seed": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians in seconds: the call, the request beside it, and the queue before it; and the same worst."""

    call: float
    beside: float
    queued: float
    worst_beside: float
    worst_queued: float


def measure(runs: int) -> Overhead:
    """Serve the embedded model in this process, and send one request after another."""
    service = ImageService(ImageGenerator(ServedModel(model="embedded", devices=("cpu",))), ServerSettings(port=0))
    with ImageServer(service) as server:
        server.start()
        service.load()
        with httpx.Client(base_url=server.url, timeout=600) as client:
            found = [_request(client) for _ in range(runs + 1)][1:]
    calls, walls, queued = zip(*found, strict=True)
    beside = [wall - call for wall, call in zip(walls, calls, strict=True)]
    return Overhead(
        call=statistics.median(calls),
        beside=statistics.median(beside),
        queued=statistics.median(queued),
        worst_beside=max(beside),
        worst_queued=max(queued),
    )


def _request(client: httpx.Client) -> tuple[float, float, float]:
    start = time.perf_counter()
    figures = client.post("/v1/images/generations", json=BODY).json()["patchpar"]
    return figures["seconds"], time.perf_counter() - start, figures["queued_seconds"]
