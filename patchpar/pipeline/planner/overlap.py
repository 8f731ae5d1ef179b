"""Whether ranks attend to gathered keys as they arrive, where the links between them are known.

An exact plan may leave that open. Both ways are replayed on the links: all keys at once have one kernel and a longer
wait, in parts some of the wait is hidden by attention to the rank's own keys, for more kernels and a merge. The process
of the caller decides, so that all ranks do the same, and the decision is a part of the plan. Ours.
"""

from dataclasses import replace

from patchpar.pipeline.auto_plan import PlanChoice
from patchpar.pipeline.planner.placement import Simulate
from patchpar.pipeline.planner.plan_order import CLOSE
from patchpar.plan.plan import Plan
from patchpar.strategies.exact import ExactPatch


def leaves_overlap_open(plan: Plan) -> bool:
    """Whether a plan gathers keys between ranks, and does not say how they attend to them."""
    found = plan.strategy
    return (
        isinstance(found, ExactPatch)
        and found.attention == "gather"
        and found.overlap is None
        and plan.patch > found.ulysses
    )


def overlap_of(plan: Plan, ranks: tuple[int, ...], simulate: Simulate) -> PlanChoice:
    """Return the plan in parts where its step is shorter by more than `CLOSE`, else as it is, which is at once.

    `ranks`: the device of each rank. Raises what `simulate` raises.
    """
    assert isinstance(plan.strategy, ExactPatch)
    in_parts = replace(plan, strategy=replace(plan.strategy, overlap=True))
    at_once, parts = (simulate(each, ranks).step.seconds for each in (plan, in_parts))
    pays = at_once > CLOSE * parts
    times = f"a step takes {1e3 * parts:.3g} ms so and {1e3 * at_once:.3g} ms with all keys at once"
    reason = f"keys {'as they arrive' if pays else 'at once'}, by links as measured: {times}"
    return PlanChoice(in_parts if pays else plan, reason)
