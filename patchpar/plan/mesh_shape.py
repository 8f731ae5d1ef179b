"""The fastest mesh shape, data x cfg x patch, for a call, by a cost model. Pure arithmetic.

The busiest rank determines the time of a step. In units of one guidance branch of one prompt on one device it is

    its prompts * its branches * (its fraction of the rows + EXCHANGE * the fraction of the keys on other ranks)

Of equal shapes the one that exchanges less wins: prompts before guidance, guidance before bands, fewer ranks before
more.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from patchpar.plan.plan import Plan

EXCHANGE = 0.1
"""Cost of an all-gather of keys and values relative to computing a branch. docs/automatic-plan.md has what was measured
between workers of one host, and what follows for GPUs with NVLink from DistriFusion's latencies of synchronous patches
(Li et al., arXiv:2402.19481, table 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work that can be split: independent prompts, guidance branches, and the largest number of bands of an image.

    `units`: the number of indivisible groups of rows; None if any split is possible.
    """

    prompts: int
    branches: int
    most_bands: int
    units: int | None = None

    def shapes(self, devices: int) -> Iterator[Plan]:
        """Yield every plan for at most `devices` devices."""
        for cfg in [each for each in range(1, self.branches + 1) if self.branches % each == 0]:
            for data in range(1, min(self.prompts, devices // cfg) + 1):
                for patch in range(1, min(self.most_bands, devices // (cfg * data)) + 1):
                    yield Plan(data=data, cfg=cfg, patch=patch)

    def step(self, plan: Plan) -> float:
        """Return the time of a step, in units of one branch of one prompt on one device."""
        prompts, branches = -(-self.prompts // plan.data), self.branches // plan.cfg
        units = self.units or plan.patch
        band = -(-units // plan.patch) / units
        return prompts * branches * (band + EXCHANGE * (1 - 1 / plan.patch))

    def soonest(self, devices: int) -> Plan:
        """Return the plan with the shortest step."""
        return self.first_of(self.shapes(devices))

    def first_of(self, plans: Iterable[Plan]) -> Plan:
        """Return that of some plans with the shortest step."""
        return min(plans, key=lambda plan: (round(self.step(plan), 9), plan.patch, plan.cfg, plan.data))
