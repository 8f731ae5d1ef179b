"""Measure the devices of this machine and their links, and keep the figures: `patchpar tune`.

All ranks compute at the same time, as in a call: those of a CPU share its memory and its clocks. Links are measured
pair by pair; pairs that are alike are a class, and what all pairs of a class send at once shows what they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from patchpar.launch.executor import Executor
from patchpar.launch.local import LocalExecutor
from patchpar.models.files import embedded_model
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
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
SIZES = (128, 512)
"""Pixels of the sides of images, a small and a large one, that real calls are measured with."""
MODELS = ("embedded", "embedded-dit")
MOST_MEASURED = 28
"""Pairs of which each is measured: those of eight devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What was measured and kept; `machine` is None if the machine was busy: then the last figures stay."""

    machine: MeasuredMachine | None
    kept_before: MeasuredMachine | None


def tune(
    devices: Sequence[str], dtype: str, kept: KeptMachines | None = None, sizes: tuple[int, ...] = SIZES
) -> TuneResult:
    """Measure these devices, and keep the figures unless other processes are too busy. Raises LaunchError."""
    kept = kept or KeptMachines.in_home()
    before = kept.find(devices)
    with LocalExecutor(devices, ENGINE, preload=[ENGINE.partition(":")[0]]) as ranks:
        machine = measured(ranks, dtype, sizes)
    if machine is not None:
        kept.keep(devices, machine)
    return TuneResult(machine=machine, kept_before=before)


def measured(ranks: Executor, dtype: str, sizes: tuple[int, ...]) -> MeasuredMachine | None:
    """Return what the ranks measure together; None if two measurements of one of them do not agree."""
    models = [(str(embedded_model(name)), sizes) for name in MODELS]
    devices = ranks.call("device", dtype, models)
    if any(each is None for each in devices):
        return None
    return MeasuredMachine(device=_slowest(devices), devices=len(devices), links=tuple(_links(ranks)))


def _slowest(devices: Sequence[MeasuredDevice]) -> MeasuredDevice:
    """Return the rates of a device in the middle, with the scale and overhead of all in the middle."""
    return replace(
        devices[0],
        scale=median(each.scale for each in devices),
        overhead=median(each.overhead for each in devices),
        memory=min(each.memory for each in devices),
    )


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
