"""What a call under a plan takes on a machine that is not there: seconds by part, bytes, and memory of each rank."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any

from patchpar.errors import PlanError
from patchpar.pipeline.planner.image_ranks import ImageRanks, PlacedTapes
from patchpar.pipeline.planner.rank_memory import RankMemory, memory_of
from patchpar.pipeline.planner.tape_recorder import DECODE, ENCODE, calls_of
from patchpar.plan.exchange_policy import CachedPartials
from patchpar.plan.plan import Plan
from patchpar.plan.replay.divided_work import DividedWork
from patchpar.plan.replay.fold import links_of, moved, pairs_of, replay_groups
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import MeasuredMachine
from patchpar.plan.replay.price import ASSUMED, CostAssumptions, Device, Prices
from patchpar.plan.replay.replay import COMPUTE, LAUNCH, STEP, WAIT, Interval, Replayed, replay
from patchpar.plan.replay.tape import Kernel, Operator, Tape, Wait, bytes_copied, bytes_sent, steps_of
from patchpar.plan.replay.topology import Topology

AnyMachine = Machine | MeasuredMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseForecast:
    """Seconds of a phase on the rank that is in it longest.

    `exposed`: waits for messages, by kind. `launch`: the device waits for the process. The parts add up to `seconds`.
    """

    seconds: float
    compute: float
    launch: float
    exposed: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        times = {"seconds": self.seconds, "compute": self.compute, "launch": self.launch}
        return times | {"exposed": dict(self.exposed)}

    @classmethod
    def mean_of(cls, phases: Sequence["PhaseForecast"]) -> "PhaseForecast":
        """Return the mean of several."""
        kinds = dict.fromkeys(kind for each in phases for kind in each.exposed)
        return cls(
            seconds=fmean(each.seconds for each in phases),
            compute=fmean(each.compute for each in phases),
            launch=fmean(each.launch for each in phases),
            exposed={kind: fmean(each.exposed.get(kind, 0.0) for each in phases) for kind in kinds},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A call of `steps` steps, of which `warm_up_steps` are like the first. `bytes_sent`: in a later step, by rank.

    `flops`: of a later step, by rank. `launching`: seconds of a later step that the process of the first rank takes to
    launch its kernels; 0 of one rank where several have graphs. `work`: these kernels; None if not known. `calls`: of
    denoisers by the first rank in a later step; 0 if not known. `rounds`: exchanges of which it waits for messages, one
    after the other, in a later step. `copied`: bytes from the host's memory, in a later step, by rank. `order`: the
    device of each rank, then idle ones; empty where they are in order. `replayed`: None of a search that was kept.
    """

    plan: Plan
    machine: AnyMachine
    steps: int
    warm_up_steps: int
    phases: Mapping[str, PhaseForecast]
    first: PhaseForecast
    step: PhaseForecast
    bytes_sent: Sequence[Mapping[str, int]]
    memory: Sequence[RankMemory]
    assumed: Sequence[str]
    replayed: Replayed | None
    flops: Sequence[int] = ()
    launching: float = 0.0
    work: DividedWork | None = None
    calls: int = 0
    rounds: int = 0
    order: tuple[int, ...] = ()
    copied: Sequence[int] = ()

    def device_of(self, rank: int) -> Device:
        """Return the device that a rank sits on."""
        return self.machine.device_at(self.order[rank] if self.order else rank)

    @property
    def largest_memory(self) -> tuple[int, Device]:
        """Bytes of the rank whose device has the least left, or lacks the most, and that device."""
        ranks = range(self.plan.world_size)
        of_rank = [(self.memory[rank % len(self.memory)].total, self.device_of(rank)) for rank in ranks]
        return max(of_rank, key=lambda each: each[0] - each[1].memory)

    @property
    def fits(self) -> bool:
        """Whether the memory of every rank's device is enough."""
        total, device = self.largest_memory
        return total <= device.memory

    @property
    def seconds(self) -> float:
        """Seconds of the whole call."""
        around = sum(self.phases[name].seconds for name in (ENCODE, DECODE) if name in self.phases)
        later = self.steps - self.warm_up_steps
        return around + self.warm_up_steps * self.first.seconds + later * self.step.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        around = {name: self.phases[name].as_dict() for name in (ENCODE, DECODE) if name in self.phases}
        return {
            "plan": str(self.plan),
            "machine": str(self.machine),
            "devices": list(self.order or range(self.plan.world_size))[: self.plan.world_size],
            "seconds": self.seconds,
            "steps": self.steps,
            "warm_up_steps": self.warm_up_steps,
            "first_step": self.first.as_dict(),
            "step": self.step.as_dict(),
            **around,
            "flops_per_step": list(self.flops),
            "bytes_sent_per_step": [dict(each) for each in self.bytes_sent],
            "bytes_copied_per_step": list(self.copied),
            "memory_bytes": [each.total for each in self.memory],
            "stale_bytes": [each.stale for each in self.memory],
            "assumed": list(self.assumed),
        }


class PlanForecasts:
    """Forecasts of a plan whose ranks are recorded, on the devices of a machine in any order.

    `warm_up_steps` of the `steps` are like the first that was recorded, the others like the last ones, of one turn
    (`steps_of_turn`), in the mean. Tapes are priced once, and orders of devices with the same links have one replay.
    Raises PlanError for more ranks than devices, and for a dtype that the device has no rate for.
    """

    def __init__(
        self,
        ranks: ImageRanks,
        plan: Plan,
        machine: AnyMachine,
        *,
        steps: int,
        warm_up_steps: int,
        assumed: CostAssumptions = ASSUMED,
    ) -> None:
        plan_fits(plan, machine)
        self._ranks, self._plan, self._machine, self._assumed = ranks, plan, machine, assumed
        self._prices: dict[str, PlacedTapes] = {}
        self._priced: dict[tuple[int, str], Tape] = {}
        self._topology, self._pairs = machine.topology(), pairs_of(ranks.messages)
        self._replays: dict[object, Replayed] = {}
        steps_in_order = [name for name in steps_of(ranks.recorded[0].tape) if name not in ("", ENCODE, DECODE)]
        self._later = steps_in_order[min(1, len(steps_in_order) - 1) :][-steps_of_turn(plan) :]
        steps_sources = [each.steps for each in ranks.sources]
        later = {rank: self._later_steps(ranks.recorded[rank].tape) for rank in dict.fromkeys(steps_sources)}
        self._last_step = later[0][-1]
        sent = {rank: _mean_bytes(found) for rank, found in later.items()}
        copied = {rank: sum(map(bytes_copied, found)) // len(found) for rank, found in later.items()}
        flops = {rank: sum(map(_flops, found)) // len(found) for rank, found in later.items()}
        self._make = partial(
            Forecast,
            plan=plan,
            machine=machine,
            steps=steps,
            warm_up_steps=min(warm_up_steps, steps),
            bytes_sent=[sent[rank] for rank in steps_sources],
            memory=[memory_of(rank) for rank in ranks.without_tapes],
            copied=[copied[rank] for rank in steps_sources],
            flops=[flops[rank] for rank in steps_sources],
        )

    def _later_steps(self, tape: Tape) -> list[Tape]:
        parts = steps_of(tape)
        return [parts[name] for name in self._later]

    def on(self, order: tuple[int, ...] = ()) -> Forecast:
        """Return the forecast with ranks on the devices of this order; the first ones without it."""
        topology, size = _ordered(self._topology, order), len(self._ranks.sources)
        devices = [self._machine.device_at(order[rank] if order else rank) for rank in range(self._plan.world_size)]
        form = links_of(self._plan.data, size, self._pairs, topology), tuple(each.name for each in devices)
        if form not in self._replays:
            self._replays[form] = self._replayed(devices, topology)
        replayed = self._replays[form]
        phases = _phases(replayed)
        first = next(phase for name, phase in phases.items() if name not in (ENCODE, DECODE))
        step = PhaseForecast.mean_of([phases[name] for name in self._later])
        kinds = {each.name: each for each in devices}.values()
        priced = steps_of(self._tape(0, devices[0]))
        launches = (entry.host for name in self._later for entry in priced[name] if isinstance(entry, Kernel))
        return self._make(
            phases=phases,
            first=first,
            step=step,
            replayed=replayed,
            order=order,
            launching=sum(launches) / len(self._later),
            work=DividedWork.of(self._last_step, devices[0], self._assumed),
            calls=calls_of(self._last_step),
            rounds=len(list(groupby(each.where for each in self._last_step if isinstance(each, Wait)))),
            assumed=(*(line for kind in kinds for line in self._assumed.lines(kind)), *self._of_links(topology)),
        )

    def _of_links(self, topology: Topology) -> Iterator[str]:
        recorded = {rank for each in self._ranks.sources for rank in (each.steps, each.decode)}
        copies = any(bytes_copied(self._ranks.recorded[rank].tape) for rank in recorded)
        if copies and not isinstance(self._machine, MeasuredMachine):
            rate = min(each.rate for each in topology.path(0, 0).resources)
            yield f"host: {rate / 1e9:.3g} GB/s from its memory to each device"
        yield from self._machine.assumptions()

    def _replayed(self, devices: Sequence[Device], topology: Topology) -> Replayed:
        """Return the replay of all ranks on these devices; of images on equal devices one stands for all."""
        size = len(self._ranks.sources)
        images = [devices[first : first + size] for first in range(0, len(devices), size)]
        if any([each.name for each in image] != [each.name for each in images[0]] for image in images):
            tapes = [
                moved(self._tape(rank, device), number * size)
                for number, image in enumerate(images)
                for rank, device in enumerate(image)
            ]
            return replay(tapes, topology)
        tapes = [self._tape(rank, device) for rank, device in enumerate(images[0])]
        return replay_groups(tapes, len(images), topology, self._pairs).slowest

    def _tape(self, rank: int, device: Device) -> Tape:
        """Return the program of a rank with the prices of a device."""
        key = rank, device.name
        if key not in self._priced:
            if device.name not in self._prices:
                self._prices[device.name] = PlacedTapes(self._ranks, Prices(device, self._assumed).of)
            self._priced[key] = self._prices[device.name].of(rank)
        return self._priced[key]


def steps_of_turn(plan: Plan) -> int:
    """Return the steps after which a plan does the same again: layers of cached partials are refreshed in turn."""
    context = plan.strategy.policy.context if plan.patch > 1 else None
    return context.refresh if isinstance(context, CachedPartials) else 1


def _mean_bytes(steps: Sequence[Tape]) -> dict[str, int]:
    total = sum(map(bytes_sent, steps), Counter[str]())
    return {kind: size // len(steps) for kind, size in total.items()}


def _flops(tape: Tape) -> int:
    return sum(entry.flops for entry in tape if isinstance(entry, Operator))


def _ordered(topology: Topology, order: tuple[int, ...]) -> Topology:
    return Topology(lambda a, b: topology.path(order[a], order[b])) if order else topology


def plan_fits(plan: Plan, machine: AnyMachine) -> None:
    """Raise PlanError for more ranks than the machine has devices, and for hosted weights of an image on more hosts."""
    if plan.world_size > machine.devices:
        plan.check_devices(machine.devices)
    hosts = getattr(machine, "hosts", 1)
    if plan.weights == "hosted" and hosts > 1 and plan.world_size // plan.data > machine.devices // hosts:
        raise PlanError(f"plan {plan} gathers hosted weights between hosts, which has no price: use weights=sharded")


def _phases(found: Replayed) -> dict[str, PhaseForecast]:
    """Return each phase on the rank that is in it longest."""
    longest: dict[str, Interval] = {}
    for each in found.intervals:
        if each.what == STEP and (each.name not in longest or each.seconds > longest[each.name].seconds):
            longest[each.name] = each
    by_rank: dict[int, list[Interval]] = {}
    for each in found.intervals:
        by_rank.setdefault(each.rank, []).append(each)
    return {name: _parts(step, by_rank[step.rank]) for name, step in longest.items()}


def _parts(step: Interval, intervals: Sequence[Interval]) -> PhaseForecast:
    inside = list(_inside(step, intervals))
    exposed: Counter[str] = Counter()
    for each in inside:
        if each.what == WAIT:
            exposed[each.kind] += each.seconds  # type: ignore[assignment]  # a Counter of floats
    return PhaseForecast(
        seconds=step.seconds,
        compute=sum(each.seconds for each in inside if each.what == COMPUTE),
        launch=sum(each.seconds for each in inside if each.what == LAUNCH),
        exposed=dict(exposed),
    )


def _inside(step: Interval, intervals: Sequence[Interval]) -> Iterator[Interval]:
    end = step.start + step.seconds
    return (each for each in intervals if each.what != STEP and step.start <= each.start + each.seconds / 2 <= end)
