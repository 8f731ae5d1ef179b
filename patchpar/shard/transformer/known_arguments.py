"""The arguments of a block that is called as it was before: our tokens of them, without a look at every leaf again.

Nearly all calls are such: the blocks of a list pass local tokens on to each other, and the rest stays what it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from patchpar.shard.transformer.block_arguments import PLAIN
from patchpar.shard.transformer.block_call import BlockRuns
from patchpar.shard.transformer.local_tokens import LocalTokens
from patchpar.shard.transformer.token_plan import TokenRows
from patchpar.shard.transformer.token_runs import Runs

Cut = Callable[[Tensor, Runs], Tensor]
"""Returns our tokens of a whole argument."""


class _Known(NamedTuple):
    """An argument of this type. `dims` and `runs`: of a tensor, and of tokens in it. `items`: those of a tuple."""

    kind: type
    dims: int = 0
    runs: Runs = ()
    items: tuple["_Known", ...] = ()


class KnownArguments:
    """Keyword arguments of a block, of which those that say how tokens are split come from a block before.

    `found`: where tokens are in such a call.
    """

    def __init__(self, found: BlockRuns, arguments: dict[str, _Known]) -> None:
        self.found, self._names, self._arguments = found, tuple(arguments), tuple(arguments.values())

    @classmethod
    def of(
        cls, found: BlockRuns, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "KnownArguments | None":
        """Return what a call like this one has; None where each of its calls has to be looked at.

        `leaves`: those of the arguments, see `leaves_and_form`.
        """
        rule = found.rule
        if args or rule.has_numbers or not _is_passed_on(rule.inputs, leaves):
            return None
        if rule.text and not _is_passed_on(rule.text[:1], leaves):
            return None
        arguments, number = dict[str, _Known](), 0
        for name, x in kwargs.items():
            known = _known(x, number, found)
            if known is None:
                return None
            arguments[name] = known
            number += len(known.items) if known.kind is tuple else known.kind is not dict
        return cls(found, arguments)

    def own(self, kwargs: dict[str, Any], cut: Cut) -> dict[str, Any] | None:
        """Return the arguments of a call with our tokens only; None where it is not like this one."""
        if (*kwargs,) != self._names:
            return None
        own: dict[str, Any] = {}
        for (name, x), (kind, dims, runs, items) in zip(kwargs.items(), self._arguments, strict=True):
            if type(x) is not kind:
                return None
            if kind is LocalTokens:
                if x.gathered is not None or x.source.runs is not runs or x.own.ndim != dims:
                    return None
                own[name] = x.own
            elif kind is Tensor:
                if x.ndim != dims:
                    return None
                own[name] = cut(x, runs) if runs else x
            elif kind is tuple:
                own_items = _own_items(x, items, cut)
                if own_items is None:
                    return None
                own[name] = own_items
            elif kind is dict and x:
                return None
            else:
                own[name] = x
        return own


def _is_passed_on(inputs: Sequence[tuple[int, TokenRows]], leaves: Sequence[Any]) -> bool:
    """Whether how tokens are split is read of local tokens, not computed for whole arguments."""
    for number, rows in inputs:
        x = leaves[number]
        if isinstance(x, LocalTokens) and any(run.rows == rows for run in x.source.runs):
            return True
    return False


def _known(x: Any, number: int, found: BlockRuns) -> _Known | None:
    """Return what is known of an argument with the leaf `number`; None where that is not all of it."""
    kind, runs = type(x), found.inputs.get(number, ())
    if kind is LocalTokens:
        return _Known(kind, x.own.ndim, runs) if x.gathered is None and x.source.runs is runs else None
    if kind is Tensor:
        return _Known(kind, x.ndim, runs)
    if kind is tuple:
        items = [_known(each, number + index, found) for index, each in enumerate(x)]
        known = tuple(each for each in items if each is not None and (each.kind is Tensor or each.kind in PLAIN))
        return _Known(kind, items=known) if len(known) == len(items) else None
    return _Known(kind) if kind in PLAIN or (kind is dict and not x) else None


def _own_items(found: tuple[Any, ...], items: tuple[_Known, ...], cut: Cut) -> tuple[Any, ...] | None:
    """Return the items of a tuple, as `KnownArguments.own` returns arguments."""
    if len(found) != len(items):
        return None
    own = list(found)
    for index, (kind, dims, runs, _) in enumerate(items):
        x = own[index]
        if type(x) is not kind or (kind is Tensor and x.ndim != dims):
            return None
        if runs:
            own[index] = cut(x, runs)
    return tuple(own)
