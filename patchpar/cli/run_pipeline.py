"""Open the pipeline of the flags, call it once with a progress bar, and report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from patchpar.cli.console import print_json, progress
from patchpar.cli.flags import ModelFlags, plan_of
from patchpar.cli.output_files import full_disk_named
from patchpar.cli.pipeline_changes import change_pipeline
from patchpar.cli.shutdown import ended_at_once
from patchpar.errors import PlanError
from patchpar.models.refused_calls import refusal_of_steps
from patchpar.models.task import RequestedTask, purpose_of

R = TypeVar("R")


@contextmanager
def sampling_in(pipe: Any, *steps: int | None) -> Iterator[None]:
    """Context of calls with these `--steps`. Raises PlanError in place of the error of a scheduler that refuses one."""
    try:
        yield
    except Exception as error:
        for each in steps:
            if refusal := refusal_of_steps(getattr(pipe, "scheduler", None), each, error):
                raise PlanError(f"--steps {each}: {refusal}: use another number, or another --scheduler") from error
        raise


def report_run(request: ModelFlags, run: Any, outputs: Sequence[Path], lines: Sequence[str], **figures: Any) -> None:
    """Save the trace if requested, and print a run's statistics: as JSON with `figures`, or as text with `lines`."""
    if request.trace is not None:
        with full_disk_named(request.trace):
            run.save_trace(request.trace)
    if request.json:
        print_json({**run.as_dict(), **figures, "outputs": [str(path) for path in outputs], **request.traced()})
        return
    for line in (str(run), *lines, *(f"saved {path}" for path in request.traced().values())):
        typer.echo(line)


def parameters_of(pipe: Any) -> Mapping[str, Any]:
    """Return the parameters of a pipeline's call; none for a class that is not of diffusers."""
    purpose = purpose_of(pipe.description.pipeline)
    return {} if purpose is None else purpose.parameters


def returned_by(
    request: ModelFlags,
    requested_task: RequestedTask,
    call: Callable[[Any], Any],
    keep: Callable[[Any], R],
    **options: Any,
) -> tuple[Any, R]:
    """Return (statistics, `keep` of the result of `call`). `options` go to `ParallelPipeline.from_pretrained`.

    `call` gets the pipeline, whose workers have started. `keep` runs while they stop. Raises PlanError for a model that
    cannot do `requested_task`: before loading if its folder shows it, else before any rank computes.
    """
    request.check_model(requested_task)
    from patchpar import ParallelPipeline
    from patchpar.models.quiet_libraries import silence_command

    plan = plan_of(request.plan, request.strategy, request.devices)
    silence_command(request.devices, plan)
    task = requested_task.task_for(request.model, request.for_loading())
    opened = {"devices": request.devices, "plan": plan, **request.for_loading(), **task, **options}
    with ThreadPoolExecutor(1) as aside, progress("generating") as step, ExitStack() as stack:
        with ended_at_once():
            pipe = stack.enter_context(ParallelPipeline.from_pretrained(request.model, **opened))
            requested_task.check(purpose_of(pipe.description.pipeline))
            pipe.set_progress_bar_config(disable=True)
            change_pipeline(pipe, request.lora, request.scheduler)
            pipe.on_step, pipe.tracing = step, request.trace is not None
            with sampling_in(pipe, request.steps):
                output = call(pipe)
        kept = aside.submit(keep, output)
        run = pipe.last_run
    return run, kept.result()
