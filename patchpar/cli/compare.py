"""`patchpar compare PROMPT`: generate an image with a plan, or several, and with one process: report differences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from patchpar.cli.console import friendly_errors, print_json, progress, stdout_kept_clean
from patchpar.cli.flag_values import refuse_torchrun
from patchpar.cli.flags import HostFlags, ImageFlags, plan_of
from patchpar.cli.generate import images_of
from patchpar.cli.output_files import check_apart, check_writable, names_for, save, with_word
from patchpar.cli.pipeline_changes import change_pipeline
from patchpar.cli.run_pipeline import parameters_of, report_run, sampling_in
from patchpar.cli.shutdown import ended_at_once
from patchpar.errors import PlanError
from patchpar.models.task import RequestedTask, purpose_of

if TYPE_CHECKING:
    from patchpar import Plan

NO_NAME = re.compile(r"[^a-z0-9]+")
WARM_UP_STEPS = 2  # memory is allocated and kernels are chosen in the first steps, which are not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareFlags(HostFlags, ImageFlags):
    """The flags of `compare`."""

    # the flag of other verbs, but several times
    strategy: Annotated[list[str] | None, typer.Option(help="How ranks exchange; several times for a table.")] = None  # type: ignore[assignment]
    output: Annotated[Path, typer.Option("--output", "-o", help="Stem of the files.")] = Path("compare.png")

    def check(self) -> None:
        """Raise PlanError for invalid flags; a strategy that is given twice, and a trace of several runs, too."""
        ImageFlags.check(self)
        several = self.strategy or []
        if twice := next((name for name in several if several.count(name) > 1), None):
            raise PlanError(f"--strategy {twice} is given twice: once is enough")
        if self.trace is not None and len(several) > 1:
            raise PlanError(f"--trace {self.trace}: it is of one run: name one --strategy")

    def sides(self) -> list[str]:
        """Return what names the files of each plan: the strategies where there are several."""
        several = self.strategy or []
        return [NO_NAME.sub("-", name).strip("-") for name in several] if len(several) > 1 else ["plan"]

    def paths(self) -> dict[str, list[Path]]:
        """Return the files of all images: of each plan, of the single process, and of the differences.

        Raises PlanError for strategies that would name them alike.
        """
        sides = self.sides()
        names = [*sides, "single", *(_difference_of(side, sides) for side in sides)]
        if len(set(names)) < len(names):
            several = ", ".join(self.strategy or ())
            raise PlanError(f"--strategy {several}: files of two would have one name; give each once")
        return {name: names_for(with_word(self.output, name), self.images) for name in names}


class ComparedRun(NamedTuple):
    """One of the runs: its statistics, and float images (H, W, C) in 0..1."""

    run: Any
    images: list[Any]


def compare(request: CompareFlags) -> None:
    """Compare plans with one process: PSNR, speed-up, bytes."""
    with friendly_errors(request.debug):
        request.check()
        paths = request.paths()
        every = list(chain.from_iterable(paths.values()))
        for path in every:
            check_writable(path)
        check_apart(*every, request.trace)
        requested_task = request.task("compare")
        request.check_model(requested_task)
        with stdout_kept_clean(request.json):
            planned, single = _all_runs(request, requested_task)
        figures = [measure_pair(each, single) for each in planned]
        _save_all(dict(zip(request.sides(), planned, strict=True)), single, paths)
        saved = [f"saved {path}" for path in every]
        if len(planned) == 1:
            report_run(request, planned[0].run, every, [*_lines(figures[0], single), *saved], **figures[0])
        else:
            _report_several(request, list(zip(planned, figures, strict=True)), single, every)


def _lines(figures: Mapping[str, float], single: ComparedRun) -> list[str]:
    return [
        f"one process: {single.run.seconds:.1f} s, speed-up {figures['speedup']:.2f}x",
        f"PSNR {figures['psnr_db']:.1f} dB, SSIM {figures['ssim']:.6f}, "
        f"largest difference {figures['max_abs_diff']:.2e} (of 1)",
    ]


def _report_several(
    request: CompareFlags, rows: Sequence[tuple[ComparedRun, dict[str, float]]], single: ComparedRun, every: list[Path]
) -> None:
    """Print a table, or JSON with an object for each plan."""
    if request.json:
        runs = [{**each.run.as_dict(), **figures} for each, figures in rows]
        print_json({"runs": runs, "single_seconds": single.run.seconds, "outputs": [str(path) for path in every]})
        return
    typer.echo(f"one process: {single.run.seconds:.1f} s")
    typer.echo(f"{'PSNR, dB':>9} {'SSIM':>8} {'largest':>9} {'seconds':>8} {'speed-up':>8} {'sent, MB':>9}  plan")
    for each, figures in rows:
        sent = max(each.run.as_dict()["bytes_per_step"]) / 1e6
        typer.echo(
            f"{figures['psnr_db']:9.1f} {figures['ssim']:8.4f} {figures['max_abs_diff']:9.2e} {each.run.seconds:8.1f} "
            f"{figures['speedup']:7.2f}x {sent:9.3f}  {each.run.as_dict()['plan']}"
        )
    typer.echo("sent: per step, by the rank that sends most")
    for path in every:
        typer.echo(f"saved {path}")


def _all_runs(request: CompareFlags, requested_task: RequestedTask) -> tuple[list[ComparedRun], ComparedRun]:
    from patchpar import Plan
    from patchpar.launch.devices import resolve_devices

    refuse_torchrun("compare")
    names: list[str | None] = list(request.strategy) if request.strategy else [None]
    plans = [plan_of(request.plan, name, request.devices) for name in names]
    references = {of_one(plan) if isinstance(plan, Plan) else Plan() for plan in plans}  # "auto" is always exact
    if len(references) > 1:
        raise PlanError("structure guidance on one rank is no plain pipeline: compare it without other strategies")
    alone = resolve_devices(request.devices).names[:1]
    found = [
        _generate(request, requested_task, {"devices": request.devices, "plan": plan}, f"under {plan}")
        for plan in plans
    ]
    single = _generate(request, requested_task, {"devices": alone, "plan": references.pop()}, "on one process")
    return found, single


def of_one(plan: Plan) -> Plan:
    """Return the plan of the single process: the plain pipeline, or structure guidance on one rank."""
    from patchpar import Plan

    return Plan(strategy=plan.strategy) if plan.strategy.for_one_rank else Plan()


def _generate(request: CompareFlags, requested_task: RequestedTask, where: dict[str, Any], title: str) -> ComparedRun:
    from patchpar import ParallelPipeline
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    opened = {**where, **request.for_loading(), **requested_task.task_for(request.model, request.for_loading())}
    inputs = request.inputs()
    with progress(title) as step, ended_at_once(), ParallelPipeline.from_pretrained(request.model, **opened) as pipe:
        requested_task.check(purpose_of(pipe.description.pipeline))
        pipe.set_progress_bar_config(disable=True)
        change_pipeline(pipe, request.lora, request.scheduler)
        exact = {"output_type": "np"}  # not rounded to 8 bits, so that small errors are measured
        takes = parameters_of(pipe)
        with sampling_in(pipe, request.steps):
            pipe(**inputs.arguments(request.for_images(), takes) | exact | {"num_inference_steps": WARM_UP_STEPS})
            pipe.on_step, pipe.tracing = step, request.trace is not None
            output = pipe(**inputs.arguments(request.for_images(), takes) | exact)
        return ComparedRun(pipe.last_run, images_of(output) or [])


def measure_pair(planned: ComparedRun, single: ComparedRun) -> dict[str, float]:
    """Return the metrics of the worst image, and the speed-up. psnr_db in dB; max_abs_diff on the 0..1 scale."""
    from patchpar.pipeline.image_metrics import max_abs_diff, psnr, ssim

    pairs = list(zip(planned.images, single.images, strict=True))
    return {
        "psnr_db": min(psnr(a, b) for a, b in pairs),
        "ssim": min(ssim(a, b) for a, b in pairs),
        "max_abs_diff": max(max_abs_diff(a, b) for a, b in pairs),
        "speedup": single.run.seconds / planned.run.seconds,
    }


def _save_all(planned: Mapping[str, ComparedRun], single: ComparedRun, paths: Mapping[str, list[Path]]) -> None:
    from patchpar.pipeline.image_metrics import as_image, difference_map

    for number, alone in enumerate(single.images):
        save(as_image(alone), paths["single"][number])
        for side, run in planned.items():
            save(as_image(run.images[number]), paths[side][number])
            difference = paths[_difference_of(side, list(planned))][number]
            save(difference_map(run.images[number], alone).image, difference)


def _difference_of(side: str, sides: Sequence[str]) -> str:
    return "difference" if len(sides) == 1 else f"{side}-difference"
