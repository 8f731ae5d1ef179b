"""A mix of small and large requests on two CPU workers, with real calls: what each policy makes of it.

All policies see the same requests at the same times. Costs are learnt before, by calls of each size on one device and
on both. A request that is refused, since its deadline cannot be met, has missed it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from patchpar import ParallelPipeline
from patchpar.errors import PatchparError
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.image_request import parse_request
from patchpar.serving.scheduling.learnt_costs import LearntCosts
from patchpar.serving.scheduling.policies import POLICIES
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings

DEVICES = ("cpu", "cpu")
SMALL_PART, SLACK = 0.7, (1.0, 2.0)
LOAD = 0.9
"""1 is what both devices can do if each has a request of its own."""
SECONDS = 600.0
"""For all requests of a policy to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealKind:
    """A kind of request: side in pixels, steps, and seconds on one device."""

    side: int
    steps: int
    alone: float = 0.0

    @property
    def body(self) -> dict[str, Any]:
        """The fields of a request."""
        size = f"{self.side}x{self.side}"
        return {"prompt": "a red house", "size": size, "num_inference_steps": self.steps, "seed": 1}


SMALL, LARGE = RealKind(side=128, steps=10), RealKind(side=256, steps=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request, seconds from the beginning to it, and from it to its deadline."""

    at: float
    kind: RealKind
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RealOutcome:
    """What a policy made of a trace: fraction of deadlines met, requests per minute, mean seconds of those made."""

    policy: str
    met: float
    per_minute: float
    seconds: float


def arrivals(small: RealKind, large: RealKind, *, count: int, seed: int = 0) -> list[Arrival]:
    """Poisson arrivals at LOAD, with deadlines of SLACK times the seconds on one device."""
    random, now, found = Random(seed), 0.0, []
    mean = SMALL_PART * small.alone + (1 - SMALL_PART) * large.alone
    for _ in range(count):
        now += random.expovariate(len(DEVICES) * LOAD / mean)
        kind = small if random.random() < SMALL_PART else large
        found.append(Arrival(at=now, kind=kind, left=random.uniform(*SLACK) * kind.alone))
    return found


class RealMix:
    """The embedded model on two workers. A context manager."""

    def __init__(self, small: RealKind = SMALL, large: RealKind = LARGE) -> None:
        self._served = ServedModel(model="embedded", devices=DEVICES)
        self._pipe = ParallelPipeline.from_pretrained("embedded", devices=list(DEVICES))
        self._costs = LearntCosts()
        self._kinds = small, large

    def __enter__(self) -> RealMix:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()

    def learn(self) -> tuple[RealKind, RealKind]:
        """Make calls of both kinds on one device and on both; return the kinds with their seconds."""
        service, found = self._service("latency"), []
        for kind in self._kinds:
            seconds = [
                self._made(service, {**kind.body, "plan": plan})
                for plan in ("single", "cfg=2", "single", "cfg=2", "single")
            ]
            found.append(replace(kind, alone=min(seconds[2::2])))
        service.close()
        small, large = found
        return small, large

    def outcome(self, policy: str, trace: list[Arrival], *, with_deadlines: bool) -> RealOutcome:
        """Send the requests of a trace at their times, and wait for all."""
        service, start = self._service(policy), time.monotonic()
        with ThreadPoolExecutor(len(trace)) as pool:
            ends = [pool.submit(self._sent, service, each, start, with_deadlines) for each in trace]
            wait(ends, SECONDS)
            service.close()
        times = [end.result() for end in ends]
        done = [(each, end) for each, end in zip(trace, times, strict=True) if end is not None]
        return RealOutcome(
            policy=policy,
            met=sum(end <= each.at + each.left for each, end in done) / len(trace),
            per_minute=60 * len(done) / max((end for _, end in done), default=SECONDS),
            seconds=sum(end - each.at for each, end in done) / max(1, len(done)),
        )

    def _sent(self, service: ImageService, each: Arrival, start: float, with_deadline: bool) -> float | None:
        """Return when a request has ended, in seconds from the beginning; None for one that was refused."""
        time.sleep(max(0.0, start + each.at - time.monotonic()))
        deadline = {"deadline_ms": max(1, round(1000 * each.left))} if with_deadline else {}
        try:
            self._made(service, {**each.kind.body, **deadline})
        except PatchparError:
            return None
        return time.monotonic() - start

    def _made(self, service: ImageService, body: dict[str, Any]) -> float:
        start = time.perf_counter()
        service.submit(parse_request(json.dumps(body).encode())).outcome.result(SECONDS)
        return time.perf_counter() - start

    def _service(self, policy: str) -> ImageService:
        generator = ImageGenerator(self._served)
        generator.adopt(self._pipe)
        generator.open = lambda: None  # type: ignore[method-assign]
        generator.close = lambda: None  # type: ignore[method-assign]  # the next policy uses the pipeline
        service = ImageService(generator, ServerSettings(policy=policy, max_queue=1000))
        service.scheduler.costs = self._costs
        service.load()
        return service


def real_outcomes(count: int, seed: int = 0) -> Iterator[tuple[RealOutcome, RealOutcome]]:
    """Every policy: with deadlines, and without any, where all requests are made."""
    with RealMix() as mix:
        trace = arrivals(*mix.learn(), count=count, seed=seed)
        for policy in POLICIES:
            yield (
                mix.outcome(policy, trace, with_deadlines=True),
                mix.outcome(policy, trace, with_deadlines=False),
            )
