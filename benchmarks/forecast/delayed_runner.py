"""What each rank of `benchmarks.forecast.ranking` runs: whole pipelines over a transport that delays messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from patchpar.comm.transport import DelayedTransport, Transport
from patchpar.launch.executor import RankContext
from patchpar.models.files import embedded_model, resolve_model
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.planner.tune.timer import TimedRun, waited_for_cores
from patchpar.pipeline.rank_connection import RankConnection
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan


class DelayedConnection(RankConnection):
    """`line`: delays messages, once it is connected."""

    line: DelayedTransport | None = None

    def connected(self) -> Transport:
        """See RankConnection."""
        if self.line is None:
            self.line = self.transport = DelayedTransport(super().connected())
        return self.line


class DelayedRunner(PipelineRunner):
    """A rank whose messages arrive no earlier than over a link with a latency and a rate."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        self._delayed = DelayedConnection(context)
        super().__init__(context, self._delayed)

    def open(self, model: str) -> None:
        """Load an embedded model and connect. Needs all ranks."""
        name, options, _ = resolve_model(embedded_model(model), {"variant": "fp16", "torch_dtype": torch.float32})
        self.load(name, options)
        self.pipe.set_progress_bar_config(disable=True)
        self._delayed.connected()

    def step_seconds(self, plan: str, link: tuple[float, float], kwargs: Mapping[str, Any], steps: int) -> TimedRun:
        """Seconds of a later step: of a call of `2 * steps`, without a call of `steps`. Needs all ranks.

        And those of it for which other processes had the core of this rank.
        """
        line = self._delayed.line
        assert line is not None
        line.latency, line.rate = link
        options = CallOptions(plan=Plan.parse(plan), verify=False)
        calls = []
        for count in (steps, steps, 2 * steps):  # the first installs the plan
            generator = torch.Generator().manual_seed(0)
            start, before = time.perf_counter(), waited_for_cores()
            self.generate({**kwargs, "num_inference_steps": count, "generator": generator}, options)
            calls.append(TimedRun(time.perf_counter() - start, waited_for_cores() - before))
        _, short, long = calls
        return TimedRun((long.seconds - short.seconds) / steps, (long.waited + short.waited) / (3 * steps))
