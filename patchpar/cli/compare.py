"""`patchpar compare PROMPT`: generate an image with a plan and with one process, and report the difference."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from patchpar.cli.console import friendly_errors, progress, stdout_kept_clean
from patchpar.cli.flags import ImageFlags, plan_of
from patchpar.cli.generate import images_of
from patchpar.cli.output_files import check_writable, names_for, save
from patchpar.cli.pipeline_changes import change_pipeline
from patchpar.cli.run_pipeline import parameters_of, report_run
from patchpar.cli.shutdown import ended_at_once
from patchpar.errors import PlanError
from patchpar.models.task import RequestedTask, purpose_of

if TYPE_CHECKING:
    from patchpar import Plan

WARM_UP_STEPS = 2  # memory is allocated and kernels are chosen in the first steps, which are not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareFlags(ImageFlags):
    """The flags of `compare`."""

    output: Annotated[Path, typer.Option("--output", "-o", help="Stem of three files.")] = Path("compare.png")


class ComparedRun(NamedTuple):
    """One of the two runs: its statistics, and float images (H, W, C) in 0..1."""

    run: Any
    images: list[Any]


def compare(request: CompareFlags) -> None:
    """Compare a plan with one process: PSNR, speed-up, bytes."""
    with friendly_errors(request.debug):
        request.check()
        paths = {
            side: names_for(request.output.with_stem(f"{request.output.stem}-{side}"), request.images)
            for side in ("plan", "single", "difference")
        }
        every = list(chain.from_iterable(paths.values()))
        for path in every:
            check_writable(path)
        requested_task = request.task("compare")
        requested_task.check_model(request.model, request.for_loading())
        with stdout_kept_clean(request.json):
            planned, single = _both(request, requested_task)
        figures = measure_pair(planned, single)
        _save_all(planned, single, paths)
        lines = [
            f"one process: {single.run.seconds:.1f} s, speed-up {figures['speedup']:.2f}x",
            f"PSNR {figures['psnr_db']:.1f} dB, SSIM {figures['ssim']:.6f}, "
            f"largest difference {figures['max_abs_diff']:.2e} (of 1)",
            *(f"saved {path}" for path in every),
        ]
        report_run(request, planned.run, every, lines, **figures)


def _both(request: CompareFlags, requested_task: RequestedTask) -> tuple[ComparedRun, ComparedRun]:
    from patchpar.launch.devices import resolve_devices
    from patchpar.launch.torchrun import torchrun_world

    if torchrun_world() is not None:
        raise PlanError("compare runs one process beside the plan's, which torchrun cannot: start it without torchrun")
    plan = plan_of(request.plan, request.strategy, request.devices)
    alone = resolve_devices(request.devices).names[:1]
    planned, used = _generate(request, requested_task, {"devices": request.devices, "plan": plan}, "under the plan")
    single, _ = _generate(request, requested_task, {"devices": alone, "plan": of_one(used)}, "on one process")
    return planned, single


def of_one(plan: Plan) -> Plan:
    """Return the plan of the single process: the plain pipeline, or structure guidance on one rank."""
    from patchpar import Plan

    return Plan(strategy=plan.strategy) if plan.strategy.for_one_rank else Plan()


def _generate(
    request: CompareFlags, requested_task: RequestedTask, where: dict[str, Any], title: str
) -> tuple[ComparedRun, Plan]:
    from patchpar import ParallelPipeline, Plan
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
        pipe(**inputs.arguments(request.for_images(), takes) | exact | {"num_inference_steps": WARM_UP_STEPS})
        pipe.on_step, pipe.tracing = step, request.trace is not None
        output = pipe(**inputs.arguments(request.for_images(), takes) | exact)
        return ComparedRun(pipe.last_run, images_of(output) or []), pipe.plan or Plan()


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


def _save_all(planned: ComparedRun, single: ComparedRun, paths: dict[str, list[Path]]) -> None:
    from patchpar.pipeline.image_metrics import as_image, difference_map

    for number, (a, b) in enumerate(zip(planned.images, single.images, strict=True)):
        save(as_image(a), paths["plan"][number])
        save(as_image(b), paths["single"][number])
        save(difference_map(a, b).image, paths["difference"][number])
