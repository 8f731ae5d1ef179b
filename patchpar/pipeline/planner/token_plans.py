"""Token plans of transformers without values: those that come with the package, or were found by a real call before."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.hooks import HookSet
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.shipped_plans import shipped_for
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.verification import Call


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
    calls: list[Call] = []

    def first(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _FirstCall

    with HookSet() as hooks:
        hooks.before(denoiser, first, with_kwargs=True)
        with suppress(_FirstCall):
            run()
    if not calls:
        raise UnsupportedModel(f"{type(denoiser).__name__} was not called, so that its tokens cannot be found")
    return discover_tokens(denoiser, denoiser.forward, *calls[0])


class _FirstCall(Exception):
    """The denoiser is called."""
