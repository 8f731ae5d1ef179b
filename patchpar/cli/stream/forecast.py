"""`patchpar stream --dry-run`: assignment of steps to ranks and expected speed, without starting ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from patchpar.cli.console import print_json
from patchpar.errors import PlanError
from patchpar.plan.scalars import whole_in

if TYPE_CHECKING:
    from patchpar.cli.stream.flags import StreamFlags
    from patchpar.models.streaming.config import StreamConfig
    from patchpar.models.streaming.stream_folder import StreamFolder
    from patchpar.plan.stream_plan import StreamPlan

COSTS = ("step", "decode", "link", "rate")
ITEM = 2
"""Bytes of a number in bfloat16, in which streams run on GPUs."""


def forecast(request: StreamFlags) -> None:
    """Print the plan and, with --costs, the expected speed. Raises PlanError."""
    from patchpar.models.streaming.stream_folder import StreamFolder

    folder, devices = StreamFolder.read(request.weights, has_weights=False), number_of(request.devices)
    plan = plan_of(folder, devices, request.inner)
    found = _figures(plan, folder, request.costs) | {"spare_devices": devices - plan.ranks}
    if request.json:
        print_json(found)
    else:
        _print(found, most_shared=min(devices // plan.steps, folder.heads) if plan.inner == 1 else 1)


def plan_of(folder: StreamFolder, devices: int, inner: int | None) -> StreamPlan:
    """Return the plan of a stream of this model. `inner`: ranks per step, None for one. Raises PlanError."""
    from patchpar.models.streaming.causal.step_sharding import check_inner
    from patchpar.plan.stream_plan import StreamPlan

    plan = StreamPlan.on_devices(folder.config.pipeline_steps, devices, inner=1 if inner is None else inner)
    if plan.inner > 1:
        check_inner(plan.inner, heads=folder.heads)
    return plan


def number_of(devices: str) -> int:
    """Return the number of devices. A plain number may exceed those of this machine."""
    from patchpar.launch.devices import resolve_devices

    return whole_in(devices) or len(resolve_devices(devices).names)


def parse_costs(text: str) -> dict[str, float]:
    """Parse costs such as `step=0.265,decode=0.15,rate=25`, in seconds and GB/s. Raises PlanError."""
    found = dict[str, float]()
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name in found:
            raise PlanError(f"--costs {text} has {name} twice: once is enough")
        try:
            found[name] = float(value)
        except ValueError:
            raise PlanError(f"--costs {text}: {part!r} is no cost; write step=0.265,decode=0.15, in seconds") from None
    if found.get("rate", 1.0) <= 0:
        raise PlanError(f"--costs {text}: rate is in GB/s, and above 0")
    if not {"step", "decode"} <= set(found) <= set(COSTS):
        raise PlanError(f"--costs {text}: give step and decode, and link if it is known, in seconds; and rate in GB/s")
    return found


def _figures(plan: StreamPlan, folder: StreamFolder, costs: str | None) -> dict[str, Any]:
    from patchpar.plan.stream_simulation import StreamCosts, simulate

    due = folder.frames / folder.config.fps
    stages = [str(stage) for stage in plan.stages]
    found: dict[str, Any] = {
        "plan": str(plan),
        "stages": stages,
        "frames_per_block": folder.frames,
        "model_fps": folder.config.fps,
        "seconds_per_block": due,
    }
    if plan.inner > 1:
        found["bytes_exchanged"] = folder.exchange_bytes(ITEM) * (plan.inner - 1) // plan.inner**2
    if costs is not None:
        known = _exchanged(plan, folder, parse_costs(costs))
        outcome = simulate(plan, StreamCosts(frames=folder.frames, **_of_stages(known, folder.config)))
        found["forecast"] = {**asdict(outcome), "text": str(outcome), "keeps_up": outcome.fps >= folder.config.fps}
    return found


def _exchanged(plan: StreamPlan, folder: StreamFolder, costs: dict[str, float]) -> dict[str, float]:
    """The costs with what ranks that share a step exchange, in seconds, in place of the rate. Raises PlanError."""
    rate = costs.pop("rate", None)
    if plan.inner == 1:
        return costs
    if rate is None:
        raise PlanError(
            f"{plan.inner} ranks share each step, and how fast depends on what they exchange: add the rate between "
            "them to --costs, in GB/s and each direction, such as rate=25"
        )
    return {**costs, "exchange": folder.exchange_bytes(ITEM) / (rate * 1e9)}


def _of_stages(costs: dict[str, float], config: StreamConfig) -> dict[str, float]:
    """The costs of the plan's steps: where all read finished blocks, one is all steps of a block and further passes."""
    if config.blocks.is_pipelined:
        return costs
    decoded = costs["decode"] if config.blocks.history == "recompute" else 0.0  # for the window of the next block
    return {**costs, "step": costs["step"] * (config.steps + config.blocks.extra_passes) + decoded}


def _print(found: dict[str, Any], most_shared: int) -> None:
    """`most_shared`: the most ranks that might share a step; 1 if there are none, or if they do so in this plan."""
    typer.echo(found["plan"])
    due, fps = found["seconds_per_block"], found["model_fps"]
    typer.echo(
        f"{found['frames_per_block']} frames per block: for {fps:g} frames/s, each stage may take at most {due:.3f} s"
    )
    for stage in found["stages"]:
        typer.echo(f"  {stage}")
    if "bytes_exchanged" in found:
        sent = found["bytes_exchanged"] / 1e6
        typer.echo(f"ranks that share a step: each sends {sent:.3g} MB per step and block in bfloat16, in attention")
    if found["spare_devices"]:
        instead = f"; with --inner {most_shared} ranks would share each step" if most_shared > 1 else ""
        typer.echo(f"devices to spare, for one that fails: {found['spare_devices']}{instead}")
    if "forecast" not in found:
        typer.echo("expected speed: add --costs step=SECONDS,decode=SECONDS, of one block on one device")
        return
    typer.echo(found["forecast"]["text"])
    if not found["forecast"]["keeps_up"]:
        typer.echo(f"this does not keep up with {fps:g} frames/s: use more ranks, fewer steps or a smaller size")
