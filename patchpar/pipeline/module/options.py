"""How the calls of a network are divided between ranks: the options of `shard_module` and `Team`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    `deadline`: seconds that a rank may wait for another. Raises PlanError, LaunchError.
    """

    plan: Plan
    verify: bool | Path = True
    ignore: tuple[str, ...] = ()
    deadline: float = 60.0
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        plan, strategy = self.plan, self.plan.strategy
        if plan.world_size != plan.patch or plan.divides_weights:
            raise PlanError(f"plan {plan}: a network by itself is divided over axis 'patch' only, by whole copies")
        if not isinstance(strategy, PatchStrategy) or strategy.axis != "patch":
            raise PlanError(
                f"strategy={strategy}: of a network by itself only rows or tokens are divided: use exact, "
                "fresh-edges, displaced or pcpp"
            )
        strategy.check_group_size(plan.patch)
        object.__setattr__(self, "seconds", check_deadline("deadline", self.deadline))

    @classmethod
    def of(cls, patch: int, *, strategy: Any, split: str, ratio: Iterable[int], **options: Any) -> ModuleOptions:
        """Return the options for so many ranks. Raises PlanError, LaunchError."""
        if isinstance(options.get("ignore"), str):
            options["ignore"] = (options["ignore"],)
        plan = Plan(patch=patch, strategy=strategy, split=split, ratio=tuple(ratio))
        return cls(plan=plan, **{**options, "ignore": tuple(options.get("ignore", ()))})

    def verifications_of(self, module: nn.Module) -> VerificationCache | None:
        """Return where verifications of a network are kept; None if it is not verified.

        Code of the libraries that its layers come from does the same in every call, and is compared in the first.
        """
        packages = {package_of(type(each).__module__) for each in module.modules()}
        return VerificationCache.of(self.verify, packages)
