"""Time of a request beside its call, against the same call in Python, and the time to its first denoiser call.

Requests and plain calls take turns, so that both see the same machine.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from patchpar.serving.generation import ImageGenerator
from patchpar.serving.server import ModelServer
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings

BODY = {"prompt": "a red house", "size": "128x128", "seed": 1}
CALL_SECONDS = 1.0
"""Length of a call, for which the number of steps is chosen."""
FEW_STEPS, MOST_STEPS = 4, 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians in seconds, and the same worst. `call`: the plain call in Python, with `steps`.

    `beside`: what a request takes longer than the plain call beside it. `first`: from the begin of a request to its
    first denoiser call. `plain_first`: the same of the plain call, which encodes the prompt too. `queued`: in the
    queue.
    """

    steps: int
    call: float
    beside: float
    worst_beside: float
    first: float
    worst_first: float
    plain_first: float
    queued: float
    worst_queued: float

    @property
    def ratio(self) -> float:
        """What a request takes longer, relative to the call."""
        return self.beside / self.call


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """Seconds of one call: the whole, to its first denoiser call, and in the queue."""

    whole: float
    first: float
    queued: float = 0.0


class CallTimer:
    """Times calls of an open service, over HTTP and in Python."""

    def __init__(self, service: ImageService, client: httpx.Client) -> None:
        self._service, self._client = service, client
        self._calls: list[float] = []
        engine: Any = service.generator.pipe._state.ranks
        engine._engine.pipe.unet.register_forward_pre_hook(lambda *_: self._calls.append(time.perf_counter()))

    def request(self, steps: int) -> TimedCall:
        """Send a request and wait for its image."""
        self._calls.clear()
        start = time.perf_counter()
        answer = self._client.post("/v1/images/generations", json={**BODY, "num_inference_steps": steps})
        figures = answer.raise_for_status().json()["patchpar"]
        whole = time.perf_counter() - start
        return TimedCall(whole=whole, first=self._calls[0] - start, queued=figures["queued_seconds"])

    def plain(self, steps: int) -> TimedCall:
        """Make the same call in Python."""
        self._calls.clear()
        start = time.perf_counter()
        job = self._service.generator.pipe.submit(
            BODY["prompt"],
            height=128,
            width=128,
            num_inference_steps=steps,
            generator=torch.Generator("cpu").manual_seed(1),
        )
        job.result()
        return TimedCall(whole=time.perf_counter() - start, first=self._calls[0] - start)

    def steps_of(self, seconds: float) -> int:
        """Return the number of steps of a call that takes about so long."""
        self.plain(FEW_STEPS)
        return max(FEW_STEPS, min(MOST_STEPS, math.ceil(FEW_STEPS * seconds / self.plain(FEW_STEPS).whole)))


def measure(runs: int, seconds: float = CALL_SECONDS) -> Overhead:
    """Serve the embedded model in this process; send requests in turn with plain calls of about so many seconds."""
    service = ImageService(ImageGenerator(ServedModel(model="embedded", devices=("cpu",))), ServerSettings(port=0))
    with ModelServer(service) as server:
        server.start()
        service.load()
        with httpx.Client(base_url=server.url, timeout=600) as client:
            timer = CallTimer(service, client)
            steps = timer.steps_of(seconds)
            timer.request(steps)
            pairs = [(timer.plain(steps), timer.request(steps)) for _ in range(runs)]
    return _of(steps, pairs)


def _of(steps: int, pairs: list[tuple[TimedCall, TimedCall]]) -> Overhead:
    beside = [request.whole - plain.whole for plain, request in pairs]
    first = [request.first for _, request in pairs]
    queued = [request.queued for _, request in pairs]
    return Overhead(
        steps=steps,
        call=statistics.median(plain.whole for plain, _ in pairs),
        beside=statistics.median(beside),
        worst_beside=max(beside),
        first=statistics.median(first),
        worst_first=max(first),
        plain_first=statistics.median(plain.first for plain, _ in pairs),
        queued=statistics.median(queued),
        worst_queued=max(queued),
    )
