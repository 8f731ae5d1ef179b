"""Which shape of ranks, data x cfg x patch, draws a call soonest. A stated rule, pure arithmetic.

The busiest rank decides. In units of one guidance branch of one prompt on one device, a step takes it

    prompts it has * branches it has * (its share of the rows + EXCHANGE * the share of the keys that others have)

Of equal shapes the one that exchanges less: prompts before guidance, guidance before bands, fewer ranks before more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from patchpar.plan.plan import Plan

EXCHANGE = 0.1
"""What it costs to fetch everybody's keys and values, beside computing all of a branch: 0.09 between workers of one
host (docs/figures/scaling.md); on GPUs with NVLink 0.06 at 3840 x 3840 pixels to 0.36 at 1024 x 1024, as follows from
the latencies of synchronous patches that DistriFusion gives (Li et al., arXiv:2402.19481, table 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What can be shared out: prompts that may be apart, branches of guidance, and into how many bands a picture goes.

    `units`: of rows that stay together, where bands are made of such; None where every share is possible.
    """

    prompts: int
    branches: int
    most_bands: int
    units: int | None = None

    def shapes(self, devices: int) -> Iterator[Plan]:
        """Every plan that these devices can carry out."""
        for cfg in [each for each in range(1, self.branches + 1) if self.branches % each == 0]:
            for data in range(1, min(self.prompts, devices // cfg) + 1):
                for patch in range(1, min(self.most_bands, devices // (cfg * data)) + 1):
                    yield Plan(data=data, cfg=cfg, patch=patch)

    def step(self, plan: Plan) -> float:
        """How long a step takes the busiest rank, in units of one branch of one prompt on one device."""
        prompts, branches = -(-self.prompts // plan.data), self.branches // plan.cfg
        units = self.units or plan.patch
        band = -(-units // plan.patch) / units
        return prompts * branches * (band + EXCHANGE * (1 - 1 / plan.patch))

    def soonest(self, devices: int) -> Plan:
        """The plan with the shortest step."""
        return min(self.shapes(devices), key=lambda plan: (round(self.step(plan), 9), plan.patch, plan.cfg, plan.data))
