"""Token plans of transformers without values: those that come with the package, or were found by a real call before."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.pipeline.planner.empty_call import arguments_of_first_call
from patchpar.shard.transformer.probe.discover import discover_tokens
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
                f"how the tokens of {name} are split is found by values, which a recording has not, and the package "
                "has no plan of it: use cfg=2 or data=N, which do not split them"
            )
        return plan


def tokens_by_values(denoiser: nn.Module, run: Callable[[], Any]) -> TokenPlan:
    """Return the plan found at the first call of a denoiser with values, in `run`. Raises UnsupportedModel."""
    call = arguments_of_first_call(denoiser, run)
    return discover_tokens(denoiser, denoiser.forward, call.args, call.kwargs)
