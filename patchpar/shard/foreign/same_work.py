"""What functions of one call say about those of another: a plain and a split one, and calls of two sizes.

    smaller call    plain    mean of (64, 8)      split    mean of (32, 8)
    this call       plain    mean of (4096, 8)    split    mean of (2048, 8)

Where the plain call does not fit in memory, the shapes of its functions follow from the other three.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap
from typing import Any

from patchpar.plan.scalars import is_whole
from patchpar.shard.foreign.cuts import Cut
from patchpar.shard.foreign.functions import FunctionCall, Many, Spec
from patchpar.shard.sdpa import TORCHS

FARTHEST = 64  # so many times as large as a part the whole may be


def without_attention(whole: list[FunctionCall], own: list[FunctionCall]) -> list[FunctionCall]:
    """Return the functions of the plain call but those of attention that ranks compute together in the split one."""
    found, mine = list[FunctionCall](), iter(own)
    expected = next(mine, None)
    for call in whole:
        if call.function is TORCHS and (expected is None or expected.function is not TORCHS):
            continue
        found.append(call)
        expected = next(mine, None)
    return found


def are_same(*calls: Sequence[FunctionCall]) -> bool:
    """Whether all of these call the same functions in the same order."""
    return all(
        len(one) == len(other) and all(x.function is y.function for x, y in zip(one, other, strict=True))
        for one, other in pairwise(calls)
    )


def are_alike(smaller: Sequence[FunctionCall], larger: Sequence[FunctionCall]) -> bool:
    """Whether the same functions of two calls differ by sizes only: a factor may be nothing in the smaller one."""
    return all(starmap(_is_alike, zip(smaller, larger, strict=True)))


def _is_alike(smaller: FunctionCall, larger: FunctionCall) -> bool:
    leaves = [list(_leaves_in((call.args, call.kwargs))) for call in (smaller, larger)]
    return len(leaves[0]) == len(leaves[1]) and all(
        type(x) is type(y) and (x == y or (is_whole(x) and x < y)) for x, y in zip(*leaves, strict=True)
    )


def _leaves_in(tree: Any) -> Iterator[Any]:
    """Yield the numbers and texts among arguments, not the shapes of tensors."""
    if isinstance(tree, Many) or type(tree) is tuple:
        for each in tree.items if isinstance(tree, Many) else tree:
            yield from _leaves_in(each)
    elif isinstance(tree, Spec):
        yield tree.dtype
    else:
        yield tree


def enlarged(
    smaller_whole: FunctionCall, smaller_own: FunctionCall, own: FunctionCall, cuts: Sequence[Cut]
) -> FunctionCall | None:
    """Return the function that the plain call would call; None where its arguments do not follow."""
    trees = [(each.args, each.kwargs) for each in (smaller_whole, smaller_own, own)]
    try:
        args, kwargs = _enlarged(trees[0], trees[1], trees[2], cuts)
    except _UnknownError:
        return None
    return own._replace(args=args, kwargs=kwargs)


class _UnknownError(Exception):
    """An argument of the plain call that does not follow from the others."""


def _enlarged(smaller_whole: Any, smaller_own: Any, own: Any, cuts: Sequence[Cut]) -> Any:
    if not type(smaller_whole) is type(smaller_own) is type(own):
        raise _UnknownError
    if isinstance(own, Spec):
        return own._replace(shape=_each(smaller_whole.shape, smaller_own.shape, own.shape, cuts))
    if isinstance(own, Many):
        return own._replace(items=_each(smaller_whole.items, smaller_own.items, own.items, cuts))
    if type(own) is tuple:
        return _each(smaller_whole, smaller_own, own, cuts)
    if smaller_whole == smaller_own:
        return own
    if is_whole(own):
        return _size(own, cuts)
    raise _UnknownError


def _each(smaller_whole: Any, smaller_own: Any, own: Any, cuts: Sequence[Cut]) -> tuple[Any, ...]:
    if not len(smaller_whole) == len(smaller_own) == len(own):
        raise _UnknownError
    return tuple(_enlarged(*items, cuts) for items in zip(smaller_whole, smaller_own, own, strict=True))


def _size(own: int, cuts: Sequence[Cut]) -> int:
    """Return the size of which `own` is ours."""
    for size in range(own + 1, own * FARTHEST + 1):
        if any(cut(size, own) is not None for cut in cuts):
            return size
    raise _UnknownError
