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


class _Items(NamedTuple):
    """An argument that is a tuple without local tokens, or a dict without any items.

    `is_cut`: whether tokens of any item are cut.
    """

    name: str
    items: tuple[_Item, ...]
    is_cut: bool


class _Other(NamedTuple):
    """An argument that is no tuple or dict. `dims` and `runs`: of a tensor, and of whole tokens in it."""

    name: str
    kind: type[Any]
    dims: int = 0
    runs: Runs = ()


_Known = _Tokens | _Items | _Other


class _CutItems(NamedTuple):
    """Items of an argument `whole`, and our tokens of them. `versions`: of its tensors, when they were cut."""

    whole: tuple[Any, ...]
    items: tuple[_Item, ...]
    versions: tuple[tuple[Tensor, int], ...]
    own: tuple[Any, ...]


class CutItems:
    """Our tokens of arguments that are tuples, such as rotary embeddings, which all blocks of a call get.

    Cut once, of use while the argument is the same object and no tensor in it has been changed.
    """

    def __init__(self) -> None:
        self._found: dict[int, _CutItems] = {}  # by the id of the argument

    def own(self, whole: Any, known: _Items, cut: Cut) -> Any:
        """Return an argument with items of our tokens only; None where they are not like the known ones."""
        found = self._found.get(id(whole))
        if found is not None and found.whole is whole and found.items == known.items:
            for x, version in found.versions:
                if x._version != version:
                    break
            else:
                return found.own
        own = _own_items(whole, known, cut)
        tensors = [x for x in whole if type(x) is Tensor] if own is not None and known.is_cut else []
        if tensors and not any(x.is_inference() for x in tensors):  # those have no versions
            self._found[id(whole)] = _CutItems(whole, known.items, tuple((x, x._version) for x in tensors), own)
        return own

    def clear(self) -> None:
        """Forget all arguments."""
        self._found.clear()


class KnownArguments:
    """Keyword arguments of a block, of which those that say how tokens are split come from a block before.

    `found`: where tokens are in such a call. `splits_text`: whether it is one in which text is split, if there is any.
    """

    def __init__(self, found: BlockRuns, kwargs: dict[str, Any], known: Sequence[_Known], *, splits_text: bool) -> None:
        self.found, self.splits_text = found, splits_text
        self._names, self._kinds = (*kwargs,), (*map(type, kwargs.values()),)
        self._tokens = tuple(each for each in known if isinstance(each, _Tokens))
        self._tensors = tuple(each for each in known if isinstance(each, _Other) and each.kind is Tensor)
        self._items = tuple(each for each in known if isinstance(each, _Items))

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
        known, number = list[_Known](), 0
        for name, x in kwargs.items():
            each = _known(name, x, number, found)
            if each is None:
                return None
            known.append(each)
            number += len(each.items) if isinstance(each, _Items) else 1
        return cls(found, kwargs, known, splits_text=splits_text)

    def own(self, kwargs: dict[str, Any], cut: Cut, items: CutItems) -> dict[str, Any] | None:
        """Return the arguments of a call with our tokens only; None where it is not like this one."""
        if (*kwargs,) != self._names or (*map(type, kwargs.values()),) != self._kinds:
            return None
        own = kwargs.copy()
        for name, dims, runs in self._tokens:
            x = kwargs[name]
            if x.gathered is not None or x.source.runs is not runs or x.own.ndim != dims:
                return None
            own[name] = x.own
        for name, _, dims, runs in self._tensors:
            x = kwargs[name]
            if x.ndim != dims:
                return None
            own[name] = cut(x, runs) if runs else x
        for known in self._items:
            found = items.own(kwargs[known.name], known, cut)
            if found is None:
                return None
            own[known.name] = found
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


def _known(name: str, x: Any, number: int, found: BlockRuns) -> _Known | None:
    """Return what is known of an argument whose first leaf has a `number`; None where that is not all of it."""
    if type(x) is LocalTokens:
        runs = found.inputs.get(number, ())
        return _Tokens(name, x.own.ndim, runs) if x.gathered is None and x.source.runs is runs else None
    if type(x) is not tuple and (type(x) is not dict or x):
        each = _item(x, number, found)
        return None if each is None else _Other(name, *each)
    items = list[_Item]()
    for each in x:
        item = _item(each, number + len(items), found)
        if item is None:
            return None
        items.append(item)
    return _Items(name, tuple(items), any(item.runs for item in items))


def _item(x: Any, number: int, found: BlockRuns) -> _Item | None:
    """Return what is known of a leaf with this `number`; None where it is no tensor or plain value."""
    if type(x) is Tensor:
        return _Item(Tensor, x.ndim, found.inputs.get(number, ()))
    return _Item(type(x)) if type(x) in PLAIN else None


def _own_items(whole: Any, known: _Items, cut: Cut) -> Any:
    """Return an argument with items of our tokens only; None where they are not like the known ones."""
    if len(whole) != len(known.items):
        return None
    own = list(whole)
    for index, (kind, dims, runs) in enumerate(known.items):
        x = own[index]
        if type(x) is not kind or (kind is Tensor and x.ndim != dims):
            return None
        if runs:
            own[index] = cut(x, runs)
    return tuple(own) if known.is_cut else whole
