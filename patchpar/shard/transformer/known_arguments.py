"""The arguments of a block that is called as it was before: our tokens of them, without a look at every leaf again.

Nearly all calls are such: the blocks of a list pass local tokens on to each other, and the rest stays what it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from patchpar.shard.transformer.block_arguments import PLAIN, ArgumentRule
from patchpar.shard.transformer.block_call import BlockRuns
from patchpar.shard.transformer.local_tokens import LocalTokens
from patchpar.shard.transformer.token_runs import Runs

Cut = Callable[[Tensor, Runs], Tensor]
"""Returns our tokens of a whole argument."""


class _Tokens(NamedTuple):
    """An argument that a block before has made. `dims`: of the tensor. `runs`: of tokens in it."""

    name: str
    dims: int
    runs: Runs


class _Item(NamedTuple):
    """An argument, or an item of one. `dims` and `runs`: of a tensor, and of whole tokens in it."""

    kind: type[Any]
    dims: int = 0
    runs: Runs = ()


class _Others(NamedTuple):
    """An argument without local tokens. `is_one`: a single item; else a tuple, or a dict without any.

    `is_cut`: whether tokens of any item are cut.
    """

    name: str
    is_one: bool
    items: tuple[_Item, ...]
    is_cut: bool


class KnownArguments:
    """Keyword arguments of a block, of which those that say how tokens are split come from a block before.

    `found`: where tokens are in such a call. `splits_text`: whether it is one in which text is split, if there is any.
    """

    def __init__(
        self, found: BlockRuns, kwargs: dict[str, Any], known: Sequence[_Tokens | _Others], *, splits_text: bool
    ) -> None:
        self.found, self.splits_text = found, splits_text
        self._names, self._kinds = (*kwargs,), (*map(type, kwargs.values()),)
        self._tokens = tuple(each for each in known if isinstance(each, _Tokens))
        self._others = tuple(each for each in known if isinstance(each, _Others))

    @classmethod
    def of(
        cls,
        found: BlockRuns,
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        splits_text: bool,
    ) -> "KnownArguments | None":
        """Return what a call like this one has; None where each of its calls has to be looked at.

        `leaves`: those of the arguments, see `leaves_and_form`.
        """
        rule = found.rule
        if args or rule.has_numbers or not _says_ranges(rule, leaves, splits_text=splits_text):
            return None
        known, number = list[_Tokens | _Others](), 0
        for name, x in kwargs.items():
            each = _known(name, x, number, found)
            if each is None:
                return None
            known.append(each)
            number += len(each.items) if isinstance(each, _Others) else 1
        return cls(found, kwargs, known, splits_text=splits_text)

    def own(self, kwargs: dict[str, Any], cut: Cut) -> dict[str, Any] | None:
        """Return the arguments of a call with our tokens only; None where it is not like this one."""
        if (*kwargs,) != self._names or (*map(type, kwargs.values()),) != self._kinds:
            return None
        own = kwargs.copy()
        for name, dims, runs in self._tokens:
            x = kwargs[name]
            if x.gathered is not None or x.source.runs is not runs or x.own.ndim != dims:
                return None
            own[name] = x.own
        for name, is_one, items, is_cut in self._others:
            found = _own_items((kwargs[name],) if is_one else kwargs[name], items, cut)
            if found is None:
                return None
            if is_cut:
                own[name] = found[0] if is_one else tuple(found)
        return own


def _says_ranges(rule: ArgumentRule, leaves: Sequence[Any], *, splits_text: bool) -> bool:
    """Whether local tokens say how tokens are split, and those of a text: nothing is computed of whole arguments."""
    for number, rows in rule.inputs:
        x = leaves[number]
        if type(x) is LocalTokens and x.source.runs[0].rows == rows:
            break
    else:
        return False
    for number, rows in rule.text[:splits_text]:
        x = leaves[number]
        return type(x) is LocalTokens and any(run.rows == rows for run in x.source.runs)
    return True


def _known(name: str, x: Any, number: int, found: BlockRuns) -> _Tokens | _Others | None:
    """Return what is known of an argument whose first leaf has a `number`; None where that is not all of it."""
    if type(x) is LocalTokens:
        runs = found.inputs.get(number, ())
        return _Tokens(name, x.own.ndim, runs) if x.gathered is None and x.source.runs is runs else None
    is_one = type(x) is not tuple and (type(x) is not dict or bool(x))
    items = list[_Item]()
    for each in (x,) if is_one else x:
        if type(each) is not Tensor and type(each) not in PLAIN:
            return None
        dims = each.ndim if type(each) is Tensor else 0
        items.append(_Item(type(each), dims, found.inputs.get(number + len(items), ())))
    return _Others(name, is_one, tuple(items), any(item.runs for item in items))


def _own_items(found: Sequence[Any], items: tuple[_Item, ...], cut: Cut) -> Sequence[Any] | None:
    """Return the items of an argument with our tokens only; None where they are not like `items`."""
    if len(found) != len(items):
        return None
    own = list(found)
    for index, (kind, dims, runs) in enumerate(items):
        x = own[index]
        if type(x) is not kind or (kind is Tensor and x.ndim != dims):
            return None
        if runs:
            own[index] = cut(x, runs)
    return own
