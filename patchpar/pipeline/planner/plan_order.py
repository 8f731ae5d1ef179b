"""The order of plans by what their steps take, in which about equal times do not count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.plan.plan import Plan

CLOSE = 1.03
"""Times of plans that count as equal."""
WITHOUT_LINKS = 1.05
"""A plan without axis patch, which needs hardly any link, counts as equal to one that is faster by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """A step of a plan: its seconds, the bytes of the rank that sends most, and whether it fits the memory."""

    plan: Plan
    seconds: float
    sent: int = 0
    fits: bool = True


def best_first(steps: Sequence[PlanStep]) -> list[int]:
    """Return the places of the steps with the best first: those that fit, and of about equal times fewer devices.

    Then an exact plan, one that sends least, one with whole weights. One device is never behind a slower plan.
    """
    remaining = sorted(range(len(steps)), key=lambda at: (not steps[at].fits, steps[at].seconds))
    ordered = []
    while remaining:
        first = steps[remaining[0]]
        close = [at for at in remaining if steps[at].fits == first.fits and _is_close(steps[at], first)]
        best = min(close, key=lambda at: _preference(steps[at]))
        ordered.append(best)
        remaining.remove(best)
    return ordered


def _is_close(step: PlanStep, first: PlanStep) -> bool:
    factor = WITHOUT_LINKS if step.plan.patch == 1 else CLOSE
    return step.seconds <= factor * first.seconds


def _preference(step: PlanStep) -> tuple[Any, ...]:
    plan = step.plan
    return plan.world_size, plan.strategy.policy.remembers, step.sent, plan.weights != "whole", step.seconds
