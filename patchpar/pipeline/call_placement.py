"""What `submit` may be given beside the arguments of the pipeline: where a call runs, and its adapters.

Does not import torch, so that a caller need not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.pipeline.auto_plan import Rule
from patchpar.plan.plan import Plan
from patchpar.plan.scalars import is_number, is_whole, plain

MAX_RETRIES = 2
Adapters = tuple[tuple[str, float], ...]
"""Names of adapters in order, and their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlacement:
    """Where a call runs. `plan`: None chooses one by `rule`. `ranks`: None is all, or as many as the plan takes.

    `max_retries`: how often it is made again after it has lost a worker.
    """

    rule: Rule
    plan: Plan | None = None
    ranks: tuple[int, ...] | None = None
    max_retries: int = 0

    def check(self, world_size: int, *, weights: Plan | None) -> None:
        """Raise PlanError if the plan takes another number of ranks than there are.

        `weights`: the plan by which ranks hold them with plan="auto"; None where each holds them whole.
        """
        plan, ranks = self.plan, self.ranks
        if plan is not None and plan.world_size > world_size:
            raise PlanError(f"plan {plan} takes {plan.world_size} ranks, and there are {world_size}: change a degree")
        if plan is None and weights is not None and ranks is not None and len(ranks) < world_size:
            raise PlanError(
                f"ranks={ranks}: the weights are divided between all {world_size} ranks, since they do not fit one, so "
                "that all of them work on each call: leave ranks out, or load a smaller model"
            )
        if plan is not None and ranks is not None and plan.world_size != len(ranks):
            raise PlanError(
                f"plan {plan} takes {plan.world_size} rank{'s' * (plan.world_size > 1)}, and ranks={ranks} are "
                f"{len(ranks)}: name {plan.world_size}, or give a plan for {len(ranks)}, such as plan='auto'"
            )


def check_retries(value: object) -> int:
    """Return a checked `max_retries`. Raises PlanError unless it is a whole number from 0."""
    found = plain(value)
    if not is_whole(found, least=0):
        raise PlanError(f"max_retries={value!r}: use a whole number from 0, which is how often a job is made again")
    return int(found)


def checked_adapters(adapters: Mapping[str, float] | None) -> Adapters | None:
    """Return adapters of an argument in a fixed order. Raises PlanError for what is no name or no finite scale."""
    if adapters is None:
        return None
    if not isinstance(adapters, Mapping):
        raise PlanError(f"adapters={adapters!r}: give scales by name, such as {{'ink': 0.8}}, or {{}} for none")
    for name, scale in adapters.items():
        if not isinstance(name, str) or not is_number(scale) or not math.isfinite(scale):
            raise PlanError(f"adapters={dict(adapters)!r}: the scale of {name!r} must be a finite number")
    return tuple(sorted((name, float(scale)) for name, scale in adapters.items()))
