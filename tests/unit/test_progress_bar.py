"""The bars of diffusers have the caller's options, and are off while it shows its own.

Those of pipelines that a pipeline is made of, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from patchpar.comm.traffic import CommStats
from patchpar.launch.argument_mismatch import compare, described
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.pipeline import ParallelPipeline
from patchpar.pipeline.pipeline_call import PipelineCall
from patchpar.pipeline.startup import check_request
from patchpar.pipeline.state import PipelineState
from patchpar.pipeline.stats_recorder import StatsRecorder
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from tests.contexts import ThreadContext

START = {"deadline": 60.0, "start_timeout": 60.0, "start_method": "auto"}
REQUEST = check_request("cpu:1", "single", **START, verify=False, vae="auto")


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


def during_a_call(pipe: Combined, rank: int = 0, **options: Any) -> Any:
    context: Any = ThreadContext(rank)
    context.pause_point = lambda: None
    recorder = StatsRecorder(CommStats(), (), tracing=False)
    return PipelineCall(pipe, context, StepClock(), CallOptions(plan=Plan(), **options), recorder).run({})


def test_they_are_off_meanwhile_and_as_they_were_after() -> None:
    pipe = Combined()
    assert during_a_call(pipe, quiet=True) == [{"disable": True}, {"desc": "decoding", "disable": True}]
    assert pipe() == [{}, {"desc": "decoding"}]
    assert "_progress_bar_config" not in vars(pipe)


@pytest.mark.parametrize(
    ("rank", "options", "seen"),
    [
        (0, None, [{}, {"desc": "decoding"}]),
        (0, {}, [{}, {}]),
        (0, {"desc": "mine"}, [{"desc": "mine"}] * 2),
        (1, {"desc": "mine"}, [{"desc": "mine", "disable": True}] * 2),
    ],
)
def test_the_first_rank_has_the_callers_options(rank: int, options: Any, seen: Any) -> None:
    pipe = Combined()
    assert during_a_call(pipe, rank, progress_bar=options) == seen
    assert pipe() == [{}, {"desc": "decoding"}]


class Torchruns:
    """Ranks in processes of their own, which have to be called by all of them together."""

    kind = "torchrun"

    def call(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("another process may set other options, or none")


def test_options_are_set_without_the_other_processes() -> None:
    """As with torch.distributed: `pipe.set_progress_bar_config(disable=rank != 0)`."""
    calls = []
    for rank in range(2):
        pipe: Any = object.__new__(ParallelPipeline)
        object.__setattr__(pipe, "_state", PipelineState(REQUEST))
        pipe._state.executor = Torchruns()
        pipe.set_progress_bar_config(disable=rank != 0)
        caller = CallController(None, {}, kind="torchrun", output_module="")
        with caller.reporting(None, pipe._state.progress):
            calls.append(caller.options(Plan(), (0, 1), REQUEST, installation=0, tracing=False))
    assert [(each.quiet, each.progress_bar) for each in calls] == [(False, {"disable": rank != 0}) for rank in range(2)]
    compare([described("generate", (each,), {}) for each in calls])


def test_jobs_have_none() -> None:
    """They are reported by `job.progress`, also those of one device."""
    caller = CallController(None, {}, kind="inline", output_module="")
    assert caller.options(Plan(), (0,), REQUEST, installation=0, tracing=False).quiet
    with caller.reporting(None, {}):
        assert not caller.options(Plan(), (0,), REQUEST, installation=0, tracing=False).quiet
