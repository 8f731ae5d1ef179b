"""`patchpar doctor`: versions, devices, links, a communication test, the model's memory, and the plan of auto."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from patchpar.cli.console import FAILURE, friendly_errors, print_json, stdout_kept_clean
from patchpar.cli.flag_values import check_deadline, refuse_torchrun
from patchpar.cli.flags import DEADLINE, Deadline, Debug, Format, Json, LocalDevices, Model, Variant, given
from patchpar.cli.gpu_facts import gpu_software, graphics_cards, lacks, links, will_use
from patchpar.cli.shutdown import ended_at_once
from patchpar.errors import PatchparError, UnsupportedModel
from patchpar.models.task import ANY_PROMPT, RequestedTask, purpose_of
from patchpar.plan.byte_sizes import readable_bytes

PACKAGES = ("patchpar", "torch", "diffusers", "transformers", "accelerate", "safetensors", "pillow", "av")
PARTS = ("weights", "activations")
BESIDE = ("kept", "host")
TASK = RequestedTask(verb="doctor")
"""doctor needs a model that generates an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags:
    """The flags of `doctor`."""

    devices: LocalDevices = "auto"
    model: Model = "embedded"
    dtype: Format = None
    variant: Variant = None
    deadline: Deadline = DEADLINE
    json: Json = False
    debug: Debug = False

    def for_loading(self) -> dict[str, Any]:
        """Return options of diffusers' from_pretrained."""
        return given(torch_dtype=self.dtype, variant=self.variant)


def doctor(request: DoctorFlags) -> None:
    """Show devices, links and memory, test communication, run a step."""
    with friendly_errors(request.debug):
        refuse_torchrun("doctor")
        check_deadline(request.deadline)
        with stdout_kept_clean(request.json), ended_at_once():
            findings = examine(request)
        if request.json:
            print_json(findings)
        else:
            _print(findings)
        if not findings["collective"]["ok"] or findings["plan"]["chosen"] is None:
            raise typer.Exit(FAILURE)


def examine(request: DoctorFlags) -> dict[str, Any]:
    """Return all results of doctor, as in its JSON. Raises PlanError."""
    from patchpar.launch.devices import resolve_devices
    from patchpar.models.files import resolve_model
    from patchpar.models.hub import cached_model

    devices, software, cards = resolve_devices(request.devices).names, gpu_software(), graphics_cards()
    model, options, folder = resolve_model(request.model, request.for_loading())  # an unknown one is refused first
    folder = folder or cached_model(model, options)
    if folder is None:
        from patchpar.models.loading import fetch_model  # imports torch

        folder = fetch_model(model, options)
    TASK.check(None if folder is None else purpose_of(folder.pipeline))
    return {
        "versions": versions(),
        "host": host(),
        "devices": cards,
        "gpu": {**software, "will_use": will_use(devices, software), "lacks": lacks(devices, cards)},
        "links": links(),
        "collective": collective_test(devices, request.deadline),
        "memory": None if folder is None else memory(folder.path, options, devices, cards),
        "plan": choice(request),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES; 'missing' for one that is not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def host() -> dict[str, Any]:
    """Return system, cores that this process may use, and free memory in bytes (None if unknown)."""
    from patchpar.launch.devices import available_cores
    from patchpar.launch.host_memory import free_memory

    return {"system": platform.platform(), "cores": available_cores(), "free_bytes": free_memory()}


def collective_test(devices: Sequence[str], deadline: float = DEADLINE) -> dict[str, Any]:
    """Start a worker on each device (two on the CPU if there is only one), add up their ranks, and stop them.

    `deadline`: seconds that a worker may make no progress.
    """
    from patchpar.launch.local import LocalExecutor

    devices = devices if len(devices) > 1 else ("cpu", "cpu")
    found: dict[str, Any] = {"devices": list(devices), "start": None, "ok": False, "error": None}
    began = time.perf_counter()
    try:
        with LocalExecutor(devices, "patchpar.comm.transport.probe:Probe", deadline=deadline) as workers:
            found["start"] = workers.start_method.note
            sums = workers.call("sum_of_ranks")
        found["ok"] = sums == [sum(range(len(devices)))] * len(devices)
        found["error"] = None if found["ok"] else f"the sum of all ranks is wrong: {sums}"
    except PatchparError as error:
        found["error"] = str(error)
    return {**found, "seconds": time.perf_counter() - began}


def memory(
    folder: Path, options: Mapping[str, Any], devices: Sequence[str], cards: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the bytes of an image of the model's default size, found without loading weights.

    On one device: those of each network's weights, and the most of other tensors while encoding, denoising and
    decoding; and what plans for `devices` take, by rank, and whether it is free. Or the reason why they are unknown.
    `context`: what a process on a GPU takes beside it, which is not free any more when free memory is asked for.
    """
    from patchpar.launch.accelerators import is_accelerator
    from patchpar.launch.host_memory import CONTEXT_BYTES
    from patchpar.models.dry_run.dry_run import dry_run
    from patchpar.models.dry_run.empty_pipeline import empty_pipeline
    from patchpar.models.dry_run.plan_memory import network_bytes
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    try:
        pipe = empty_pipeline(folder, options)
        pipe.set_progress_bar_config(disable=True)
        run = dry_run(pipe, prompt=ANY_PROMPT)
    except UnsupportedModel as error:
        return {"weights": None, "activations": None, "plans": None, "context": None, "why": str(error)}
    context = CONTEXT_BYTES if any(map(is_accelerator, devices)) else 0
    plans = plans_for(devices, network_bytes(pipe), run.memory, cards)
    found = {"weights": dict(run.weight_bytes), "activations": dict(run.peaks), "plans": plans}
    return {**found, "context": context, "why": ""}


def plans_for(
    devices: Sequence[str], networks: Mapping[str, Any], call: Any, cards: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return what plans for these devices take on each rank and of the host.

    Those that plan="auto" may choose, the fastest first, then others. `call`: a CallMemory.
    """
    from patchpar import Plan
    from patchpar.launch.host_memory import FreeMemory, free_memory
    from patchpar.models.dry_run.plan_memory import plans_by_cost, plans_by_name

    free_of = {card["device"]: card["free_bytes"] for card in cards}
    of_cards = [free_of.get(device) for device in devices]
    device = min((free for free in of_cards if free is not None), default=None)
    free = FreeMemory(device=device, host=free_memory())
    found = [
        *plans_by_cost(Plan(patch=len(devices)), networks, call, free),
        *plans_by_name(len(devices), networks, call, on_gpus=device is not None),
    ]
    return [
        {
            "plan": str(each.plan),
            "ranks": list(each.ranks),
            "kept": each.kept,
            "host": each.host,
            "fits": each.fits(free),
        }
        for each in found
    ]


def choice(request: DoctorFlags) -> dict[str, Any]:
    """Run one step of an image of the model's default size; return the chosen plan, its reason and the statistics.

    Where no plan has room for the model, or the step fails, there is none, and the reason is that.
    """
    from patchpar import ParallelPipeline
    from patchpar.models.quiet_libraries import silence_command

    devices, options = request.devices, {"deadline": request.deadline, **request.for_loading()}
    silence_command(devices)
    found = {"model": request.model, "chosen": None, "why": "", "ran": None}
    try:
        with ParallelPipeline.from_pretrained(request.model, devices=devices, **options) as pipe:
            TASK.check(purpose_of(pipe.description.pipeline))
            pipe.set_progress_bar_config(disable=True)
            pipe(ANY_PROMPT, num_inference_steps=1)
            return found | {"chosen": str(pipe.plan), "why": pipe.explain(), "ran": str(pipe.last_run)}
    except PatchparError as error:  # the rest of what was found is of use all the same
        return found | {"why": f"{type(error).__name__}: {error}"}


def _print(findings: dict[str, Any]) -> None:
    typer.echo("versions  " + ", ".join(f"{name} {number}" for name, number in findings["versions"].items()))
    machine = findings["host"]
    typer.echo(f"host      {machine['system']}, {machine['cores']} cores, {_of_memory(machine['free_bytes'])} free")
    for card in findings["devices"]:
        if card["error"]:
            typer.echo(f"device    {card['device']} cannot be used: {card['error']}")
            continue
        memory = f"{_of_memory(card['free_bytes'])} of {_of_memory(card['total_bytes'])} free"
        peers = "" if not card["peers"] else f", reaches the memory of {', '.join(card['peers'])}"
        capability = f", compute capability {card['capability']}" if card["capability"] else ""
        typer.echo(f"device    {card['device']} {card['name']}, {memory}{capability}{peers}")
    if not findings["devices"]:
        typer.echo("device    no GPU: workers run on the CPU")
    software = findings["gpu"]
    parts = [f"{name} {software[name] or 'missing'}" for name in ("driver", "toolkit", "nccl", "triton")]
    typer.echo(f"gpu       {', '.join(parts)}")
    typer.echo(f"use       {software['will_use']}")
    for each in software["lacks"]:
        typer.echo(f"lacks     {each}")
    if findings["links"]:
        typer.echo(f"links     {findings['links']}")
    test = findings["collective"]
    result = "works" if test["ok"] else f"FAILS: {test['error']}"
    typer.echo(f"workers   one exchange among {', '.join(test['devices'])}: {result} ({test['seconds']:.1f} s)")
    typer.echo(f"start     {test['start']}")
    if findings["memory"] is not None:
        typer.echo(f"memory    {_memory_text(findings['memory'])}")
        for line in _plan_lines(findings["memory"]["plans"] or ()):
            typer.echo(f"          {line}")
    plan = findings["plan"]
    typer.echo(f"plan      {plan['model']}: {plan['why']}")
    typer.echo(f"image     {'none' if plan['ran'] is None else plan['ran']}")


def _memory_text(found: dict[str, Any]) -> str:
    if found["why"]:
        return f"unknown: {found['why']}"
    texts = [", ".join(f"{name} {readable_bytes(size)}" for name, size in found[part].items()) for part in PARTS]
    total = sum(found["weights"].values()) + max(found["activations"].values())
    context = f", and {readable_bytes(found['context'])} for the context of a process" if found["context"] else ""
    parts = f"weights ({texts[0]}) and activations ({texts[1]}) of one image{context}"
    return f"{readable_bytes(total)} on one device: {parts}"


def _plan_lines(plans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table: what each plan takes on the first rank and on the others, and of the host.

    `kept`: how much of it are keys and values of the last step.
    """
    width = max((len(each["plan"]) for each in plans), default=0)
    if plans:
        yield f"{'plan':{width}}  {'rank 0':>10}  {'others':>10}  {'kept':>10}  {'host':>10}  fits"
    for each in plans:
        first, *others = each["ranks"]
        cells = (
            readable_bytes(first),
            readable_bytes(others[0]) if others else "",
            *(readable_bytes(each[x]) if each[x] else "" for x in BESIDE),
        )
        fits = {True: "yes", False: "no", None: "unknown"}[each["fits"]]
        yield f"{each['plan']:{width}}  {'  '.join(f'{cell:>10}' for cell in cells)}  {fits}"


def _of_memory(size: int | None) -> str:
    return "unknown memory" if size is None else readable_bytes(size)
