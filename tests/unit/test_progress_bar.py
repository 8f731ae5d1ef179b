"""The bars of diffusers are off while a caller shows its own, also those of pipelines that a pipeline is made of."""

from __future__ import annotations

from typing import Any

from patchpar.comm.traffic import CommStats
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.pipeline_call import PipelineCall
from patchpar.pipeline.stats_recorder import StatsRecorder
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from tests.contexts import ThreadContext


class Part:
    """Keeps what it is told of its bar as diffusers does."""

    def set_progress_bar_config(self, **config: Any) -> None:
        self._progress_bar_config = config


class Combined(Part):
    """Tells its parts, and keeps nothing itself."""

    components: Any = {}  # noqa: RUF012  as of a pipeline without networks

    def __init__(self) -> None:
        self.prior_pipe, self.decoder_pipe = Part(), Part()
        self.decoder_pipe.set_progress_bar_config(desc="decoding")

    def set_progress_bar_config(self, **config: Any) -> None:
        for part in (self.prior_pipe, self.decoder_pipe):
            part.set_progress_bar_config(**config)

    def __call__(self) -> list[Any]:
        return [dict(vars(part).get("_progress_bar_config", {})) for part in (self.prior_pipe, self.decoder_pipe)]


def test_they_are_off_meanwhile_and_as_they_were_after() -> None:
    pipe = Combined()
    context: Any = ThreadContext()
    context.pause_point = lambda: None
    options = CallOptions(plan=Plan(), quiet=True)
    seen = PipelineCall(pipe, context, StepClock(), options, StatsRecorder(CommStats(), (), tracing=False)).run({})
    assert seen == [{"disable": True}, {"desc": "decoding", "disable": True}]
    assert pipe() == [{}, {"desc": "decoding"}]
    assert "_progress_bar_config" not in vars(pipe)
