"""How the calls of a network are divided between ranks: the options of `shard_module` and `Team`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from patchpar.errors import PlanError
from patchpar.launch.executor import check_deadline
from patchpar.plan.plan import Plan
from patchpar.shard.hooks import package_of
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.strategy import PatchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOptions:
    """Checked options. `plan`: of axis `patch` alone. `ignore`: arguments whose numbers and texts may change freely.

    `verify`: whether the split call is compared with the plain one at first use; a folder keeps the results there.
    `deadline`: seconds that a rank may wait for another.
    """

    plan: Plan
    verify: bool | Path
    ignore: tuple[str, ...]
    deadline: float

    @classmethod
    def of(cls, plan: Plan, *, verify: bool | Path, ignore: Iterable[str], deadline: float) -> ModuleOptions:
        """Return the options for a plan. Raises PlanError, LaunchError."""
        if not isinstance(plan.strategy, PatchStrategy):
            raise PlanError(
                f"strategy={plan.strategy}: of a network by itself only rows or tokens are divided: use exact, "
                "fresh-edges, displaced or pcpp"
            )
        plan.strategy.check_group_size(plan.patch)
        names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        return cls(plan=plan, verify=verify, ignore=names, deadline=check_deadline("deadline", deadline))

    def verifications_of(self, module: nn.Module) -> VerificationCache | None:
        """Return where verifications of a network are kept; None if it is not verified.

        Code of the libraries that its layers come from does the same in every call, and is compared in the first.
        """
        packages = {package_of(type(each).__module__) for each in module.modules()}
        return VerificationCache.of(self.verify, packages)
