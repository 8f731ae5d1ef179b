"""`patchpar plan MODEL --machine 8xH100-nvlink`: the plan with the shortest step among those that fit, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from patchpar.cli.console import friendly_errors, print_json, stdout_kept_clean
from patchpar.cli.simulate import SimulatedCallFlags, copied_line, megabytes, readable_seconds
from patchpar.plan.byte_sizes import readable_bytes

if TYPE_CHECKING:
    from patchpar.pipeline.planner.forecast import Forecast
    from patchpar.pipeline.planner.search import PlanSearchResult

LISTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags(SimulatedCallFlags):
    """The flags of `plan`."""

    fresh: Annotated[bool, typer.Option("--fresh", help="Record and search anew, whatever is kept.")] = False


def plan(request: PlanFlags) -> None:
    """Find the plan with the shortest predicted step on a machine."""
    with friendly_errors(request.debug):
        request.check()
        with stdout_kept_clean(request.json):
            found = _searched(request)
        if request.json:
            print_json(found.as_dict() | {"best": str(found.best.plan)})
            return
        for line in lines(found):
            typer.echo(line)


def _searched(request: PlanFlags) -> PlanSearchResult:
    from patchpar.pipeline.planner.kept_searches import searched
    from patchpar.strategies import parse_strategy

    strategy = parse_strategy(request.strategy or "exact")
    simulator = request.simulator(fresh=request.fresh)
    found = searched(simulator, simulator.call.branches, strategy)
    found.best  # noqa: B018 - raises where nothing fits
    return found


def lines(found: PlanSearchResult) -> Iterator[str]:
    """Yield the best plans as a table, and what is assumed."""
    from patchpar.pipeline.planner.search import edges_of
    from patchpar.plan.replay.measured_machine import MeasuredMachine

    best = found.best
    known = "measured rates" if isinstance(best.machine, MeasuredMachine) else "published rates, not measured"
    yield f"plan      {best.plan} on {best.machine}: predicted from {known}"
    yield f"{'':10}{'step':>9} {'compute':>9} {'launches':>9} {'waits':>9} {'memory':>10}  plan"
    for each in found.ranked[:LISTED]:
        yield f"{'':10}{_row(each)}"
    if found.refused:
        yield f"refused   {'; '.join(f'{name}: {why}' for name, why in found.refused.items())}"
    if found.skipped:
        yield f"skipped   {', '.join(map(str, found.skipped))}: no faster than others even without exchange"
    if best.order:
        yield f"devices   {', '.join(map(str, best.order[: best.plan.world_size]))}: of ranks 0, 1, ..."
    alone = next(each for each in found.ranked if each.plan.world_size == 1)
    if best.plan.world_size > 1 and alone.flops and alone.flops[0]:
        ranks, fraction = best.plan.world_size, max(best.flops) / alone.flops[0]
        yield f"work      {fraction:.3f} of one device's step on the busiest rank; 1/{ranks} is {1 / ranks:.3f}"
    if best.plan.patch > 1 and best.plan.strategy.policy.remembers:
        held = readable_bytes(max(each.stale for each in best.memory))
        yield f"held      {held} of stale values from step to step on each device, of the memory above"
        yield f"edges     {edges_of(best).reason}"
    yield f"sent      {megabytes(best.bytes_sent[0])} per step by rank 0"
    yield from copied_line(best)
    for number, line in enumerate(best.assumed):
        yield f"{'assumed   ' if number == 0 else ' ' * 10}{line}"


def _row(found: Forecast) -> str:
    step, memory = found.step, max(each.total for each in found.memory)
    times = (step.seconds, step.compute, step.launch, sum(step.exposed.values()))
    fits = "" if found.fits else " (does not fit)"
    columns = [*(f"{readable_seconds(each):>9}" for each in times), f"{readable_bytes(memory):>10}"]
    return f"{' '.join(columns)}  {found.plan}{fits}"
