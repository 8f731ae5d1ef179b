"""`patchpar tune`: measure the devices of this machine and their links, for `plan --machine local`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.console import FAILURE, friendly_errors, print_json, stdout_kept_clean
from patchpar.cli.flag_values import refuse_torchrun
from patchpar.cli.flags import Debug, Dtype, Json, LocalDevices
from patchpar.cli.shutdown import ended_at_once

if TYPE_CHECKING:
    from patchpar.pipeline.planner.tune.tune import TuneResult
    from patchpar.plan.replay.measured_device import MeasuredDevice
    from patchpar.plan.replay.measured_machine import MeasuredMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags:
    """The flags of `tune`."""

    devices: LocalDevices = "auto"
    dtype: Annotated[
        Dtype | None, typer.Option(metavar="<format>", help="Dtype of kernels; default: bfloat16, on a CPU float32.")
    ] = None
    json: Json = False
    debug: Debug = False


def tune(request: TuneFlags) -> None:
    """Measure this machine's devices and links, for predictions."""
    with friendly_errors(request.debug):
        refuse_torchrun("tune")
        start = time.perf_counter()
        with stdout_kept_clean(request.json), ended_at_once():
            found = _tuned(request)
        seconds = time.perf_counter() - start
        if request.json:
            print_json(as_dict(found, seconds))
        else:
            for line in lines(found, seconds):
                typer.echo(line)
        if found.machine is None:
            raise typer.Exit(FAILURE)


def _tuned(request: TuneFlags) -> TuneResult:
    from patchpar.launch.devices import resolve_devices
    from patchpar.pipeline.planner.tune.tune import tune as measure

    devices = resolve_devices(request.devices).names
    on_cpu = all(name == "cpu" for name in devices)
    return measure(devices, request.dtype or ("float32" if on_cpu else "bfloat16"))


def lines(found: TuneResult, seconds: float) -> Iterator[str]:
    """Yield what was measured, or that the machine was busy."""
    machine = found.machine
    if machine is None:
        kept = "the figures measured before stay" if found.kept_before is not None else "nothing was kept"
        yield (
            "busy      other processes took cores from this one, or two measurements of one call differ by more than "
            f"5 %: {kept}; run it when nothing else runs"
        )
        return
    yield f"machine   {machine}, in {seconds:.1f} s"
    for name, text in _device_lines(machine):
        yield f"{name:9} {text}"
    for line in machine.assumptions():
        yield f"{'':9} {line}"
    yield 'use       --machine local of `patchpar plan` and `patchpar simulate`, and plan="auto" of calls'


def _device_lines(machine: MeasuredMachine) -> Iterator[tuple[str, str]]:
    for device in _kinds(machine):
        of = f"{device.name}: " if machine.is_mixed else ""
        fastest = max(each.rate for each in device.products)
        yield "products", f"{of}up to {fastest / 1e9:,.0f} GFLOP/s in {device.dtype}"
        times = f"{device.scale:.2f} times the sum of their kernels, and {1e6 * device.overhead:.1f} µs per kernel"
        yield "calls", f"{of}{times}"


def _kinds(machine: MeasuredMachine) -> list[MeasuredDevice]:
    return list({each.name: each for each in (machine.device, *machine.mixed)}.values())


def as_dict(found: TuneResult, seconds: float) -> dict[str, Any]:
    """Return what `--json` prints. `seconds`: that the measurement took."""
    machine = found.machine
    if machine is None:
        return {"busy": True, "machine": None, "seconds": seconds}
    links = [{"pairs": each.pairs, "latency": each.latency, "rate": each.rate} for each in machine.links]
    kinds = [{"name": each.name, "scale": each.scale, "overhead": each.overhead} for each in _kinds(machine)]
    measured = {"machine": str(machine), "device": kinds[0], "kinds": kinds, "links": links, "host": machine.host}
    return {"busy": False, **measured, "seconds": seconds}
