"""Measure the devices of this machine and their links, and keep the figures: `patchpar tune`.

All ranks compute at the same time, as in a call: those of a CPU share its memory and its clocks. Links are measured
pair by pair; pairs that are alike are a class, and what all pairs of a class send at once shows what they share.
Devices of several kinds have rates of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from patchpar.launch.executor import Executor
from patchpar.launch.local import LocalExecutor
from patchpar.models.files import embedded_model
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.pipeline.planner.tune.timer import ROUNDS, TimedRun, settled
from patchpar.plan.replay.measured_device import MeasuredDevice
from patchpar.plan.replay.measured_machine import (
    LARGE_MESSAGE,
    LinkClass,
    MeasuredLink,
    MeasuredMachine,
    classes_of,
    shared_rate,
)

ENGINE = "patchpar.pipeline.planner.tune.rank:TuningRank"
CALLS = (("embedded", 128), ("embedded", 512), ("embedded-dit", 128), ("embedded-dit", 512))
"""Models, and pixels of the sides of images, small and large, that real calls are measured with."""
CALLS_ON_CPU = (("embedded", 128), ("embedded-dit", 384))
"""The same for a CPU, on which a large call of the UNet takes seconds: docs/figures/prices.md is measured with them."""
MOST_MEASURED = 28
"""Pairs of which each is measured: those of eight devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What was measured and kept; `machine` is None if the machine was busy: then the last figures stay."""

    machine: MeasuredMachine | None
    kept_before: MeasuredMachine | None


def tune(devices: Sequence[str], dtype: str, kept: KeptMachines | None = None) -> TuneResult:
    """Measure these devices, and keep the figures unless other processes are too busy.

    Raises LaunchError, and PlanError where figures cannot be kept.
    """
    kept = kept or KeptMachines.in_home()
    kept.check_can_keep()
    before = kept.find(devices)
    calls = CALLS_ON_CPU if "cpu" in devices else CALLS
    with LocalExecutor(devices, ENGINE, preload=[ENGINE.partition(":")[0]]) as ranks:
        machine = measured(ranks, dtype, calls)
    if machine is not None:
        kept.keep(devices, machine)
    return TuneResult(machine=machine, kept_before=before)


def measured(ranks: Executor, dtype: str, calls: Sequence[tuple[str, int]]) -> MeasuredMachine | None:
    """Return what the ranks measure together; None if two measurements of one of them do not agree."""
    ranks.call("rates", dtype)
    seconds: list[list[float]] = []
    for model, size in calls:
        ranks.call("prepare", dtype, str(embedded_model(model)), size)
        taken = _seconds(ranks)
        if taken is None:
            return None
        seconds.append(taken)
    devices = by_kind(ranks.call("fit", seconds))
    mixed = tuple(devices) if len({each.name for each in devices}) > 1 else ()
    host = min(ranks.call("host_rate"))
    return MeasuredMachine(device=devices[0], devices=len(devices), links=tuple(_links(ranks)), mixed=mixed, host=host)


def _seconds(ranks: Executor) -> list[float] | None:
    """Return the seconds of the prepared call on each rank, all at the same time; None if one does not settle."""
    rounds: list[list[Sequence[TimedRun]]] = [[] for _ in range(ranks.world_size)]
    found: list[float | None] = [None] * ranks.world_size
    for _ in range(ROUNDS):
        for rank, runs in enumerate(ranks.call("timed")):
            rounds[rank].append(runs)
            found[rank] = found[rank] or settled(rounds[rank])
        taken = [each for each in found if each is not None]
        if len(taken) == len(found):
            return taken
    return None


def by_kind(devices: Sequence[MeasuredDevice]) -> list[MeasuredDevice]:
    """Return for each device the rates of its kind, by name: of the first such device, with the medians of all such."""
    alike = {each.name: [other for other in devices if other.name == each.name] for each in devices}
    kinds = {
        name: replace(
            found[0],
            scale=median(each.scale for each in found),
            overhead=median(each.overhead for each in found),
            memory=min(each.memory for each in found),
        )
        for name, found in alike.items()
    }
    return [kinds[each.name] for each in devices]


def _links(ranks: Executor) -> list[LinkClass]:
    pairs = list(combinations(range(ranks.world_size), 2))
    if not pairs:
        return []
    found: list[MeasuredLink] = []
    for pair in pairs[:MOST_MEASURED]:
        found += [link for link in ranks.call("link", *pair) if link is not None]
    classes = classes_of(found)
    known = {pair for each in classes for pair in each.pairs}
    classes[-1] = replace(classes[-1], pairs=(*classes[-1].pairs, *(pair for pair in pairs if pair not in known)))
    return [_with_shared(ranks, each) for each in classes]


def _with_shared(ranks: Executor, link: LinkClass) -> LinkClass:
    seconds = [each for each in ranks.call("all_at_once", link.pairs) if each is not None]
    sent = dict.fromkeys(link.pairs, 2 * LARGE_MESSAGE / max(seconds))
    return replace(link, shared=shared_rate(link, sent))
