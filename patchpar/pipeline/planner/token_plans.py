"""Token plans of transformers without values: those that come with the package, or were found by a real call before."""

from collections.abc import Mapping

from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.shipped_plans import shipped_for
from patchpar.shard.transformer.token_plan import TokenPlan


class KnownTokens:
    """Token plans by denoiser. `found`: by its class, before those that come with the package."""

    def __init__(self, found: Mapping[str, TokenPlan] | None = None) -> None:
        self._found = dict(found or {})

    def of(self, denoiser: nn.Module) -> TokenPlan:
        """Return the plan of a denoiser. Raises UnsupportedModel where none is known."""
        name = type(denoiser).__name__
        shipped = None if name in self._found else shipped_for(denoiser)
        plan = self._found.get(name) or (None if shipped is None else shipped.plan_for(denoiser))
        if plan is None:
            raise UnsupportedModel(
                f"how the tokens of {name} are split is found by computing with values, a recording has none, and the "
                "package has no token plan of it: use cfg=2 or data=N, which do not split them"
            )
        return plan
