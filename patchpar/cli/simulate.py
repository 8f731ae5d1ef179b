"""`patchpar simulate MODEL --machine 8xH100-nvlink --plan cfg=2,patch=4`: seconds, bytes and memory of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.console import friendly_errors, print_json, stdout_kept_clean
from patchpar.cli.flag_values import check_guidance, check_positive
from patchpar.cli.flags import Debug, Format, Json, given, read_plan
from patchpar.cli.output_files import check_can_write, full_disk_named
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.replay.tape import COPIED

if TYPE_CHECKING:
    from patchpar.pipeline.planner.forecast import Forecast, PhaseForecast
    from patchpar.pipeline.planner.simulate import Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCallFlags:
    """Flags of a model, a machine and a call."""

    model: Annotated[str, typer.Argument(help="A folder, with or without weights; 'embedded'.")]
    machine: Annotated[
        str, typer.Option(help="8xH100-nvlink, 1xH100+1xL40, 2x(4xL40)-eth100; local: measured by tune.")
    ]
    strategy: Annotated[str | None, typer.Option(help="How ranks of axis patch exchange; default: exact.")] = None
    height: Annotated[int | None, typer.Option(help="Pixels; default: the model's own size.")] = None
    width: Annotated[int | None, typer.Option(help="Pixels; default: the model's own size.")] = None
    num_frames: Annotated[int | None, typer.Option(help="Frames of a video; default: the pipeline's own.")] = None
    steps: Annotated[int | None, typer.Option(help="Denoising steps; default: the pipeline's own.")] = None
    guidance_scale: Annotated[float | None, typer.Option(help="Guidance; default: the pipeline's own.")] = None
    dtype: Format = None
    graphs: Annotated[bool | None, typer.Option(help="A step is one launch; default: on several GPUs.")] = None
    json: Json = False
    debug: Debug = False

    def check(self) -> None:
        """Raise PlanError for a count below 1, and a guidance scale that is not finite."""
        check_guidance(self.guidance_scale)
        check_positive(self, "height", "width", "num_frames", "steps")

    def simulator(self, *, fresh: bool = False) -> Simulator:
        """Return what simulates the call; `fresh`: whatever is kept. Raises PlanError."""
        from patchpar.pipeline.planner.simulate import Simulator

        loading = given(torch_dtype=self.dtype, graphs=self.graphs)
        return Simulator(self.model, self.machine, loading, self._call(), fresh=fresh)

    def _call(self) -> dict[str, Any]:
        return given(
            height=self.height,
            width=self.width,
            num_frames=self.num_frames,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFlags(SimulatedCallFlags):
    """The flags of `simulate`."""

    plan: Annotated[str, typer.Option(help="single, or degrees: cfg=2,patch=4.")] = "single"
    trace: Annotated[Path | None, typer.Option(help="Write the simulated timeline, for Perfetto.")] = None


def simulate(request: SimulateFlags) -> None:
    """Predict a plan's step time, bytes and memory on a machine."""
    with friendly_errors(request.debug):
        request.check()
        if request.trace is not None:
            check_can_write(request.trace, "--trace", "trace.json")
        with stdout_kept_clean(request.json):
            found = _forecast(request)
        if request.trace is not None:
            from patchpar.plan.replay.chrome_trace import write_chrome_trace

            assert found.replayed is not None  # only results of searches are kept without
            with full_disk_named(request.trace):
                write_chrome_trace(request.trace, found.replayed)
        if request.json:
            print_json(found.as_dict() | given(trace=None if request.trace is None else str(request.trace)))
            return
        for line in lines(found):
            typer.echo(line)
        if request.trace is not None:
            typer.echo(f"saved {request.trace}")


def _forecast(request: SimulateFlags) -> Forecast:
    return request.simulator().of(read_plan(request.plan, request.strategy))


def lines(found: Forecast) -> Iterator[str]:
    """Yield a forecast as text."""
    yield f"plan      {found.plan} on {found.machine}: simulated, not measured"
    yield f"step      {_text(found.step)}"
    if found.warm_up_steps:
        yield f"warm-up   {found.warm_up_steps} of {found.steps} steps: {_text(found.first)}"
    around = [f"{name} {readable_seconds(phase.seconds)}" for name, phase in found.phases.items() if "step" not in name]
    yield f"call      {readable_seconds(found.seconds)} for {found.steps} steps, {', '.join(around)}"
    most = max(range(len(found.bytes_sent)), key=lambda rank: sum(found.bytes_sent[rank].values()))
    yield f"sent      {megabytes(found.bytes_sent[most])} per step by rank {most}, which sends most"
    yield from copied_line(found)
    of_ranks = range(len(found.memory))
    rank = max(of_ranks, key=lambda each: found.memory[each].total - found.device_of(each).memory)
    memory, of_device = found.memory[rank], found.device_of(rank).memory
    parts = f"weights {readable_bytes(memory.weights)}, other tensors {readable_bytes(memory.tensors)}, "
    parts += f"buffers of kernels {readable_bytes(memory.buffers)}, CUDA {readable_bytes(memory.context)}"
    parts += f", of the other tensors {readable_bytes(memory.stale)} held from step to step" if memory.stale else ""
    fits = "" if memory.total <= of_device else ": DOES NOT FIT"
    yield f"memory    {readable_bytes(memory.total)} of {readable_bytes(of_device)}{fits} ({parts})"
    for number, line in enumerate(found.assumed):
        yield f"{'assumed   ' if number == 0 else ' ' * 10}{line}"


def copied_line(found: Forecast) -> Iterator[str]:
    """Yield what is copied from the host's memory; nothing where no weights are hosted."""
    if any(found.copied):
        rank = max(range(len(found.copied)), key=lambda each: found.copied[each])
        waits = f"waited for {readable_seconds(found.step.exposed.get(COPIED, 0.0))} beside the computation"
        yield f"copied    {_number(found.copied[rank] / 1e6)} MB per step from the host to rank {rank}, {waits}"


def _text(phase: PhaseForecast) -> str:
    parts = [f"compute {readable_seconds(phase.compute)}", f"launches {readable_seconds(phase.launch)}"]
    parts += [f"waits for {kind} {readable_seconds(seconds)}" for kind, seconds in phase.exposed.items()]
    return f"{readable_seconds(phase.seconds)}: {', '.join(parts)}"


def readable_seconds(seconds: float) -> str:
    """Return seconds for people."""
    return f"{_number(seconds)} s" if seconds >= 1 else f"{_number(1e3 * seconds)} ms"


def megabytes(sent: Mapping[str, int]) -> str:
    """Return bytes by kind for people."""
    kinds = ", ".join(f"{kind} {_number(size / 1e6)}" for kind, size in sent.items())
    return f"{_number(sum(sent.values()) / 1e6)} MB{f' ({kinds})' if kinds else ''}"


def _number(value: float) -> str:
    """Return three digits, or all of a whole number: no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
