"""What a call under a plan takes on a machine that is not there: seconds by part, bytes, and memory of each rank."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from patchpar.launch.host_memory import CONTEXT_BYTES
from patchpar.pipeline.planner.image_ranks import ImageRanks
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.tape_recorder import DECODE, ENCODE
from patchpar.plan.plan import Plan
from patchpar.plan.replay.fold import links_of, pairs_of, replay_groups
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import MeasuredMachine
from patchpar.plan.replay.price import ASSUMED, CostAssumptions, Prices
from patchpar.plan.replay.replay import COMPUTE, LAUNCH, STEP, WAIT, Interval, Replayed
from patchpar.plan.replay.tape import Kernel, Operator, Tape, bytes_sent, steps_of
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
        return {
            "seconds": self.seconds,
            "compute": self.compute,
            "launch": self.launch,
            "exposed": dict(self.exposed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank: its weights, the most of its other tensors at a time, and what CUDA takes."""

    weights: int
    tensors: int
    context: int = CONTEXT_BYTES

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.tensors + self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A call of `steps` steps, of which `warm_up_steps` are like the first. `bytes_sent`: in a later step, by rank.

    `flops`: of a later step, by rank. `launching`: seconds of a later step that the process of the first rank takes to
    launch its kernels. `order`: the device of each rank, then idle ones; empty where they are in order.
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
    replayed: Replayed
    flops: Sequence[int] = ()
    launching: float = 0.0
    order: tuple[int, ...] = ()

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
            "devices": list(self.order or range(self.plan.world_size)),
            "seconds": self.seconds,
            "steps": self.steps,
            "warm_up_steps": self.warm_up_steps,
            "first_step": self.first.as_dict(),
            "step": self.step.as_dict(),
            **around,
            "flops_per_step": list(self.flops),
            "bytes_sent_per_step": [dict(each) for each in self.bytes_sent],
            "memory_bytes": [each.total for each in self.memory],
            "assumed": list(self.assumed),
        }


class PlanForecasts:
    """Forecasts of a plan whose ranks are recorded, on the devices of a machine in any order.

    `warm_up_steps` of the `steps` are like the first that was recorded, the others like the last. Tapes are priced
    once, and orders of devices with the same links have one replay. Raises PlanError for more ranks than devices, and
    for a dtype that the device has no rate for.
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
        prices = Prices(machine.device, assumed)
        self._tapes = [prices.of(tape) for tape in ranks.tapes]
        self._data, self._topology = plan.data, machine.topology()
        self._pairs = pairs_of(self._tapes)
        self._replays: dict[object, Replayed] = {}
        parts = [steps_of(tape) for tape in ranks.tapes]
        last = [name for name in parts[0] if name not in ("", ENCODE, DECODE)][-1]
        priced = steps_of(self._tapes[0])[last]
        self._make = partial(
            Forecast,
            plan=plan,
            machine=machine,
            steps=steps,
            warm_up_steps=min(warm_up_steps, steps),
            bytes_sent=[bytes_sent(each[last]) for each in parts],
            memory=[memory_of(rank) for rank in ranks.ranks],
            assumed=(*assumed.lines(machine.device), *machine.assumptions()),
            flops=[_flops(each[last]) for each in parts],
            launching=sum(entry.host for entry in priced if isinstance(entry, Kernel)),
        )

    def on(self, order: tuple[int, ...] = ()) -> Forecast:
        """Return the forecast with ranks on the devices of this order; the first ones without it."""
        topology = _ordered(self._topology, order)
        form = links_of(self._data, len(self._tapes), self._pairs, topology)
        if form not in self._replays:
            self._replays[form] = replay_groups(self._tapes, self._data, topology).slowest
        replayed = self._replays[form]
        phases = _phases(replayed)
        in_order = [name for name in phases if name not in (ENCODE, DECODE)]
        first, step = phases[in_order[0]], phases[in_order[-1]]
        return self._make(phases=phases, first=first, step=step, replayed=replayed, order=order)


def _flops(tape: Tape) -> int:
    return sum(entry.flops for entry in tape if isinstance(entry, Operator))


def _ordered(topology: Topology, order: tuple[int, ...]) -> Topology:
    return Topology(lambda a, b: topology.path(order[a], order[b])) if order else topology


def plan_fits(plan: Plan, machine: AnyMachine) -> None:
    """Raise PlanError for a plan with more ranks than the machine has devices."""
    if plan.world_size > machine.devices:
        plan.check_devices(machine.devices)


def memory_of(rank: RecordedRank) -> RankMemory:
    """Return the memory that a recorded rank takes."""
    return RankMemory(weights=sum(rank.weight_bytes.values()), tensors=max(rank.peaks.values()))


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
    for each in intervals:
        middle = each.start + each.seconds / 2
        if each.what != STEP and step.start <= middle <= end:
            yield each
