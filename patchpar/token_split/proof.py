"""Try a block's plan on a share of its tokens: all that the block computes must be what it is with all of them.

Attention is severed here too, so no other rank is needed. Whether a number among the arguments counts tokens, which
nothing shows that moves, is found out by trying: it does if the block is right only when it is told the share's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.token_split.plan import BlockPlan, Rows
from patchpar.token_split.provenance import TOLERANCE, Observed
from patchpar.token_split.shares import Shares
from patchpar.token_split.watch import Arguments, SeenBlock, observe_block

ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest value
MOST_COUNTS = 4  # numbers that may be counts: sets of them are tried


def proved(plan: BlockPlan, block: SeenBlock, tokens: int, sizes: Sequence[int]) -> BlockPlan:
    """The plan, with the arguments that count tokens: those whose value is one of `sizes`. Raises UnsupportedModel."""
    whole, reasons = observe_block(block.module, block.arguments), []
    for counts in _possible_counts(block.arguments, sizes):
        candidate = replace(plan, counts=counts)
        try:
            _try(candidate, block, whole, tokens)
        except (RuntimeError, ValueError, IndexError) as error:
            reasons.append(str(error))
            continue
        return candidate
    raise UnsupportedModel(f"with some of its tokens alone it fails: {reasons[0]}")


def _possible_counts(arguments: Arguments, sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Sets of arguments that may be numbers of tokens, the smallest sets first."""
    numbers = [name for name, leaf in arguments.leaves().items() if type(leaf) is int and leaf in sizes]
    for size in range(min(len(numbers), MOST_COUNTS) + 1):
        yield from combinations(numbers[:MOST_COUNTS], size)


def _try(plan: BlockPlan, block: SeenBlock, whole: Observed, tokens: int) -> None:
    """Run the block on the middle of its tokens. Raises UnsupportedModel, or what the block raises."""
    first, last = tokens // 3, tokens // 3 * 2 + 1
    shares = Shares(place=1, starts=(0, first, last, tokens))

    def share(name: str, leaf: object) -> object:
        if name in plan.counts and isinstance(leaf, int):
            return leaf - tokens + shares.count
        rows = plan.inputs.get(name)
        return leaf if rows is None or not isinstance(leaf, Tensor) else rows.cut(leaf, shares)

    own = observe_block(block.module, block.arguments.map(share))
    for name, rows in _rows_observed(plan, whole):
        want = whole[name] if rows is None else rows.cut(whole[name], shares)
        if name not in own or own[name].shape != want.shape:
            raise UnsupportedModel(f"its {name} is of another shape than it should be")
        if not _close(own[name], want):
            raise UnsupportedModel(f"its {name} is another one then")


def _rows_observed(plan: BlockPlan, whole: Observed) -> Iterator[tuple[str, Rows | None]]:
    """What to compare, and where tokens are in it; masks may be what they like."""
    for number, call in enumerate(plan.attentions):
        yield f"attention {number} query", call.queries
        yield f"attention {number} key", call.keys
        yield f"attention {number} value", call.keys
    for name in whole:
        if name.startswith("output"):
            yield name, plan.outputs.get(int(name.split()[1]))


def _close(x: Tensor, y: Tensor) -> bool:
    """Up to the rounding of products over another number of rows, which a wrong row is far above."""
    allowed = ROUNDING.get(y.dtype, TOLERANCE)
    if not (y.is_floating_point() or y.is_complex()):
        return torch.equal(x, y)
    return not y.numel() or bool((x - y).abs().max() <= allowed * y.abs().max())
