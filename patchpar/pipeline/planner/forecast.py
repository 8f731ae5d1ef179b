"""What a call under a plan takes on a machine that is not there: seconds by part, bytes, and memory of each rank."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.pipeline.planner.image_ranks import ImageRanks
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.tape_recorder import DECODE, ENCODE
from patchpar.plan.plan import Plan
from patchpar.plan.replay.fold import replay_groups
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import MeasuredMachine
from patchpar.plan.replay.price import ASSUMED, CostAssumptions, Prices
from patchpar.plan.replay.replay import COMPUTE, LAUNCH, STEP, WAIT, Interval, Replayed
from patchpar.plan.replay.tape import Kernel, Operator, Tape, bytes_sent, steps_of
from patchpar.plan.replay.topology import Topology

AnyMachine = Machine | MeasuredMachine
CONTEXT_BYTES = 700_000_000
"""Of a GPU's memory, for the CUDA context and kernels."""


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


def forecast(  # noqa: PLR0913 - each is a setting of its own, by name
    ranks: ImageRanks,
    plan: Plan,
    machine: AnyMachine,
    *,
    steps: int,
    warm_up_steps: int,
    assumed: CostAssumptions = ASSUMED,
    order: tuple[int, ...] = (),
) -> Forecast:
    """Return the forecast of a plan whose ranks are recorded, on the first devices of a machine, or in this `order`.

    `warm_up_steps` of the `steps` are like the first that was recorded, the others like the last. Raises PlanError
    for more ranks than devices, and for a dtype that the device has no rate for.
    """
    plan_fits(plan, machine)
    prices = Prices(machine.device, assumed)
    tapes = [prices.of(tape) for tape in ranks.tapes]
    replayed = replay_groups(tapes, plan.data, _ordered(machine.topology(), order)).slowest
    phases = _phases(replayed)
    in_order = [name for name in phases if name not in (ENCODE, DECODE)]
    last = in_order[-1]
    return Forecast(
        plan=plan,
        machine=machine,
        steps=steps,
        warm_up_steps=min(warm_up_steps, steps),
        phases=phases,
        first=phases[in_order[0]],
        step=phases[last],
        bytes_sent=[bytes_sent(steps_of(tape)[last]) for tape in ranks.tapes],
        memory=[memory_of(rank) for rank in ranks.ranks],
        assumed=(*assumed.lines(machine.device), *machine.assumptions()),
        replayed=replayed,
        flops=[_flops(steps_of(tape)[last]) for tape in ranks.tapes],
        launching=sum(entry.host for entry in steps_of(tapes[0])[last] if isinstance(entry, Kernel)),
        order=order,
    )


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
