"""`patchpar bench`: strategies x ranks x steps on any model and prompts, in one table and one plot. Resumable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from patchpar.cli.bench.flags import BenchFlags
from patchpar.cli.bench.records import BenchSetting, RecordFile
from patchpar.cli.console import FAILURE, friendly_errors, print_json, progress, stdout_kept_clean
from patchpar.cli.flag_values import refuse_torchrun
from patchpar.cli.flags import given
from patchpar.cli.output_files import written_whole
from patchpar.cli.pipeline_changes import change_pipeline
from patchpar.cli.run_pipeline import sampling_in
from patchpar.cli.shutdown import ended_at_once
from patchpar.errors import PlanError
from patchpar.models.size_grid import check_sides
from patchpar.models.task import RequestedTask, purpose_of

if TYPE_CHECKING:
    from patchpar.cli.bench.runner import BenchResult, Perceptual
    from patchpar.cli.bench.table import BenchRow

LIBRARIES = ("patchpar", "diffusers", "transformers", "torch")
RECORDS, TABLE, PLOT = "records.jsonl", "table.md", "plot.svg"


def bench(request: BenchFlags) -> None:
    """Compare plans on many prompts: quality, bytes, seconds."""
    with friendly_errors(request.debug):
        request.check()
        prompts = request.all_prompts()
        refuse_torchrun("bench")
        with stdout_kept_clean(request.json):
            found = _measured(request, prompts)
        rows = _written(request.output, found)
        _report(request, rows, found)
        if found.refused:
            raise typer.Exit(FAILURE)


def _measured(request: BenchFlags, prompts: Sequence[str]) -> BenchResult:
    from patchpar import ParallelPipeline
    from patchpar.cli.bench.runner import BenchRunner, prompts_from
    from patchpar.launch.devices import resolve_devices
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    options = request.for_loading()
    task = RequestedTask(verb="bench")
    check_sides(task.check_model(request.model, options), height=request.height, width=request.width)
    devices = resolve_devices(request.devices).names
    plans = request.all_plans(len(devices))
    if not plans:
        raise PlanError(f"no plan takes more than 1 rank: name more devices than {request.devices!r} with --devices")
    file = RecordFile(request.output / RECORDS)
    if file.outdated:
        typer.echo(f"{file.path}: {file.outdated} images of an earlier version are measured anew", err=True)
    lpips = _lpips() if request.lpips else None
    with (
        _says_how_to_go_on(file),
        progress("images") as on_image,
        ended_at_once(),
        ParallelPipeline.from_pretrained(request.model, devices=request.devices, **options) as pipe,
    ):
        task.check(purpose_of(pipe.description.pipeline))
        pipe.set_progress_bar_config(disable=True)
        change_pipeline(pipe, request.lora, request.scheduler)
        runner = BenchRunner(pipe=pipe, devices=devices, call=_call(request), file=file, lpips=lpips, on_image=on_image)
        settings = _settings(request, options, type(pipe.scheduler).__name__)
        with sampling_in(pipe, *request.all_steps()):
            return runner.measure(settings, plans, list(prompts_from(prompts, request.seed)))


@contextmanager
def _says_how_to_go_on(file: RecordFile) -> Iterator[None]:
    """Where a signal ends the run, say that the same command measures only what the file does not have."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        images = "1 image" if len(file.records) == 1 else f"{len(file.records)} images"
        with suppress(OSError):  # SIGHUP: the terminal has gone
            typer.echo(f"{file.path} has {images}: the same command goes on from there", err=True)
        raise


def _call(request: BenchFlags) -> dict[str, Any]:
    """Return the arguments of all calls."""
    return given(
        height=request.height,
        width=request.width,
        guidance_scale=request.guidance_scale,
        negative_prompt=request.negative_prompt,
    )


def _settings(request: BenchFlags, options: dict[str, Any], scheduler: str) -> list[BenchSetting]:
    import torch

    from patchpar.cli.bench.runner import model_name
    from patchpar.cli.doctor import versions
    from patchpar.models.files import resolve_model
    from patchpar.models.loading import dtype_of

    found, name = versions(), model_name(request.model, options)
    dtype = str(dtype_of(resolve_model(request.model, options)[1]) or torch.float32).removeprefix("torch.")
    return [
        BenchSetting(
            model=name,
            dtype=dtype,
            scheduler=scheduler,
            height=request.height,
            width=request.width,
            steps=steps,
            guidance_scale=request.guidance_scale,
            negative_prompt=request.negative_prompt,
            loras=tuple(request.lora or ()),
            libraries=", ".join(f"{package} {found[package]}" for package in LIBRARIES),
        )
        for steps in request.all_steps()
    ]


def _lpips() -> Perceptual:
    """Return LPIPS, with weights in the cache folder. Raises PlanError where they cannot be had."""
    import torch

    from patchpar.cli.bench.lpips import Lpips, fetch
    from patchpar.shard.verification_cache import VerificationCache

    try:
        network = Lpips(fetch(VerificationCache.in_home("lpips").folder))
    except RuntimeError as error:
        raise PlanError(f"--lpips: {error}; leave it out, or try again with a network") from error

    def distance(one: Any, other: Any) -> float:
        pair = (torch.as_tensor(each).movedim(-1, 0)[None] * 2 - 1 for each in (one, other))
        return network(*pair).item()

    return distance


def _written(folder: Path, found: BenchResult) -> list[BenchRow]:
    """Write table and plot, and return the rows."""
    from patchpar.cli.bench.plot import plot
    from patchpar.cli.bench.table import markdown, rows_of

    rows = rows_of(found.records)
    devices = ", ".join(dict.fromkeys(name for record in found.records for name in record.devices)) or "no device"
    for name, text in ((TABLE, markdown(rows, found.refused, devices)), (PLOT, plot(rows) if rows else "")):
        with written_whole(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return rows


def _report(request: BenchFlags, rows: Sequence[BenchRow], found: BenchResult) -> None:
    from dataclasses import asdict

    outputs = [str(request.output / name) for name in (TABLE, PLOT, RECORDS)]
    if request.json:
        print_json({"rows": [asdict(row) for row in rows], "refused": found.refused, "outputs": outputs})
        return
    typer.echo((request.output / TABLE).read_text(encoding="utf-8"))
    for path in outputs:
        typer.echo(f"saved {path}")
