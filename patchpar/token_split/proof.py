"""Try a block's plan on a share of its tokens: all that the block computes must be what it is with all of them.

Attention is severed here too, so no other rank is needed. Whether a number among the arguments counts tokens, which
nothing shows that moves, is found out by trying: it does if the block is right only when it is told the share's. So it
is with a number of the first tokens that are treated otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.selection import Across
from patchpar.token_split.mixing import Mixing
from patchpar.token_split.plan import BlockPlan, Rows
from patchpar.token_split.provenance import TOLERANCE, Observed
from patchpar.token_split.shares import Shares
from patchpar.token_split.watch import Arguments, SeenBlock, observe_block

ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest value
MOST_COUNTS = 4  # numbers that may be counts: sets of them are tried
MOST_BOUNDS = 2  # likewise


def proved(
    plan: BlockPlan, block: SeenBlock, tokens: int, sizes: Sequence[int], num_rows: int | None = None
) -> BlockPlan:
    """The plan, with the arguments that count tokens: those whose value is one of `sizes`, or, of the first, less.

    Raises UnsupportedModel.

    `num_rows`: how many rows the tokens are laid out in, where convolutions are over them; the arguments that say how
    many are found as well.
    """
    whole, reasons = observe_block(block.module, block.arguments, _severed_in(plan)), []
    row_counts = [()] if num_rows is None else list(_possible_counts(block.arguments, (num_rows,)))
    sets_of_counts = list(_possible_counts(block.arguments, sizes))
    bounds = list(_possible_counts(block.arguments, range(1, tokens), MOST_BOUNDS))
    for first, by_row, counts in product(bounds, row_counts, sets_of_counts):  # without any bound first
        mixing = None if plan.mixing is None else replace(plan.mixing, row_counts=by_row)
        candidate = replace(plan, counts=counts, bounds=first, mixing=mixing)
        try:
            _try(candidate, block, whole, _middle(tokens, num_rows or tokens))
        except (RuntimeError, ValueError, IndexError) as error:
            reasons.append(str(error))
            continue
        return candidate
    raise UnsupportedModel(f"with some of its tokens alone it fails: {reasons[0]}")


def _possible_counts(arguments: Arguments, sizes: Sequence[int], most: int = MOST_COUNTS) -> Iterator[tuple[str, ...]]:
    """Sets of arguments that may be numbers of tokens, the smallest sets first."""
    numbers = [name for name, leaf in arguments.leaves().items() if type(leaf) is int and leaf in sizes]
    for size in range(min(len(numbers), most) + 1):
        yield from combinations(numbers[:most], size)


def _severed_in(plan: BlockPlan) -> frozenset[int] | None:
    return None if plan.mixing is None else frozenset(plan.mixing.sums)


def _middle(tokens: int, num_rows: int) -> Shares:
    """Of three places' whole rows those of the second."""
    first, last = num_rows // 3, num_rows // 3 * 2 + 1
    return Shares(place=1, starts=(0, first, last, num_rows), across=Across(tokens // num_rows))


def _try(plan: BlockPlan, block: SeenBlock, whole: Observed, shares: Shares) -> None:
    """Run the block on our share of its tokens. Raises UnsupportedModel, or what the block raises."""
    arguments = block.arguments.map(lambda name, leaf: _shared(plan, shares, name, leaf))
    own = observe_block(block.module, arguments, _severed_in(plan))
    rounding = max(ROUNDING.get(x.dtype, TOLERANCE) for x in block.arguments.tensors().values())
    for name, rows in _rows_observed(plan, whole):
        want = whole[name] if rows is None else rows.cut(whole[name], shares)
        if name not in own or own[name].shape != want.shape:
            raise UnsupportedModel(f"its {name} is of another shape than it should be")
        if not _close(own[name], want, rounding):
            raise UnsupportedModel(f"its {name} is another one then")
    if plan.mixing is not None:
        _same_columns(plan.mixing, own, whole)


def _shared(plan: BlockPlan, shares: Shares, name: str, leaf: object) -> object:
    """What our share of the block is called with in the place of an argument."""
    if plan.mixing is not None and name in plan.mixing.row_counts:
        return shares.num_rows
    if name in plan.counts and isinstance(leaf, int):
        return leaf - shares.num_tokens + shares.count
    if name in plan.bounds and isinstance(leaf, int):
        return shares.before(leaf)
    rows = plan.inputs.get(name)
    return leaf if rows is None or not isinstance(leaf, Tensor) else rows.cut(leaf, shares)


def _same_columns(mixing: Mixing, own: Observed, whole: Observed) -> None:
    """Raise UnsupportedModel where tokens are in order, but in other rows: a count of columns was taken for theirs."""
    for number in mixing.convolutions:
        name = f"convolution {number} grid"
        if own[name].shape[3] != whole[name].shape[3]:
            raise UnsupportedModel(f"its {name} has other columns than it should have")


def _mixing_observed(mixing: Mixing, whole: Observed) -> Iterator[tuple[str, Rows]]:
    for number in mixing.sums:
        left, right = (f"product {number} {side}" for side in ("left", "right"))
        yield left, Rows(whole[left].ndim - 1)
        yield right, Rows(whole[right].ndim - 2)
    for number in mixing.convolutions:
        yield f"convolution {number} cells", Rows(2)


def _rows_observed(plan: BlockPlan, whole: Observed) -> Iterator[tuple[str, Rows | None]]:
    """What to compare, and where tokens are in it; masks may be what they like."""
    for number, call in enumerate(plan.attentions):
        yield f"attention {number} query", call.queries
        yield f"attention {number} key", call.keys
        yield f"attention {number} value", call.keys
    if plan.mixing is not None:
        yield from _mixing_observed(plan.mixing, whole)
    for name in whole:
        if name.startswith("output"):
            yield name, plan.outputs.get(int(name.split()[1]))


def _close(x: Tensor, y: Tensor, rounding: float) -> bool:
    """Up to the rounding of products over another number of rows, which a wrong row is far above.

    `rounding`: that of the block's arguments. What is made of them may be of a finer dtype, as what linear attention
    sums, but it has been rounded as they are.
    """
    allowed = max(rounding, ROUNDING.get(y.dtype, TOLERANCE))
    if not (y.is_floating_point() or y.is_complex()):
        return torch.equal(x, y)
    return not y.numel() or bool((x - y).abs().max() <= allowed * y.abs().max())
