"""Verify a block's plan on some of its tokens: the block must compute the same as with all of them.

Attention is severed here too, so no other rank is needed. Perturbation does not show whether an integer argument counts
tokens, so this is tried: it does if the block is correct only with the number of the part. The same holds for an
integer that counts the first tokens, those that the block computes differently from the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.plan.kv_selection import TokensAcross
from patchpar.shard.transformer.probe.capture import CallArguments, CapturedBlock
from patchpar.shard.transformer.probe.observe_block import WHOLE, Severance, observe_block, part_argument
from patchpar.shard.transformer.probe.row_trace import TOLERANCE, Observed
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_plan import BlockPlan, TokenRows
from patchpar.shard.transformer.token_ranges import TOKEN, TokenGrid, TokenRanges
from patchpar.shard.unsupported_model import attempted

ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest value
MOST_COUNTS = 4  # integers that may be counts: all sets of them are tried
MOST_BOUNDS = 2  # likewise for bounds


def proved(
    plan: BlockPlan, block: CapturedBlock, severance: Severance, sizes: Sequence[int], grid: TokenGrid | None = None
) -> BlockPlan:
    """Return the verified plan with the arguments that count tokens. Raises UnsupportedModel.

    Counts have one of the values `sizes`, of which the first is the number of tokens; bounds are smaller than that.
    `grid`: the grid of convolutions, if there are any; the arguments that count its rows and frames are found as well.
    """
    trial, tokens = _BlockTrial(block, severance, sizes), sizes[0]
    if grid is None:
        return trial.proved(plan, _middle(tokens, TOKEN))
    rows = TokensAcross(grid.columns, planes=grid.frames)
    plan = trial.proved(plan, _middle(grid.rows, rows), grid.rows)
    if grid.frames == 1:
        return plan
    return trial.proved(plan, _middle(grid.frames, TokensAcross(grid.columns, rows=grid.rows)), grid.frames)


class _BlockTrial:
    """Runs a block on some of its tokens."""

    def __init__(self, block: CapturedBlock, severance: Severance, sizes: Sequence[int]) -> None:
        self.block, self.severance, self.sizes = block, severance, sizes
        self.whole = observe_block(block.module, block.arguments, severance)

    def proved(self, plan: BlockPlan, ranges: TokenRanges, lines: int | None = None) -> BlockPlan:
        """Return the plan with the arguments that count tokens; `lines` stay whole. Raises UnsupportedModel."""
        failures: list[Exception] = []
        by_line = [()] if lines is None else list(self._counting((lines,)))
        bounds = list(self._counting(range(1, self.sizes[0]), MOST_BOUNDS))
        sets_of_counts = list(self._counting(self.sizes))
        for first, counted, counts in product(bounds, by_line, sets_of_counts):  # without any bound first
            mixing = None if plan.mixing is None else plan.mixing.counting(counted, ranges.across)
            candidate = replace(plan, counts=counts, bounds=first, mixing=mixing)
            with attempted(failures):
                _try(candidate, self.block, self.severance, self.whole, ranges)
                return candidate
        raise UnsupportedModel(f"with some of its tokens alone it fails: {failures[0]}")

    def _counting(self, sizes: Sequence[int], most: int = MOST_COUNTS) -> Iterator[tuple[str, ...]]:
        """Yield sets of integer arguments that may count tokens, the smallest sets first."""
        leaves = self.block.arguments.leaves().items()
        numbers = [name for name, leaf in leaves if type(leaf) is int and leaf in sizes]
        for size in range(min(len(numbers), most) + 1):
            yield from combinations(numbers[:most], size)


def middle_of(tokens: int) -> TokenRanges:
    """Return the token ranges of the second of three ranks, in runs."""
    return _middle(tokens, TOKEN)


def _middle(lines: int, across: TokensAcross) -> TokenRanges:
    return TokenRanges(group_rank=1, starts=(0, lines // 3, lines // 3 * 2 + 1, lines), across=across)


def _try(plan: BlockPlan, block: CapturedBlock, severance: Severance, whole: Observed, ranges: TokenRanges) -> None:
    """Run the block on the tokens of `ranges` and compare. Raises UnsupportedModel, or what the block raises."""
    arguments = block.arguments.map(lambda name, leaf: _shared(plan, ranges, name, leaf))
    found = _rows_observed(plan, whole)
    wanted = {name: whole[name] if rows is None else rows.cut(whole[name], ranges) for name, rows in found}
    own = observed_alike(block, arguments, wanted, severance)
    if plan.mixing is not None:
        _same_grid(plan.mixing, own, whole, ranges)


def observed_alike(
    block: CapturedBlock, arguments: CallArguments, wanted: Observed, severance: Severance = WHOLE
) -> Observed:
    """Return what is observed in the block called with some of its tokens, which must include `wanted`.

    Raises UnsupportedModel where it does not, or what the block raises.
    """
    own, rounding = observe_block(block.module, arguments, severance), rounding_of(block.arguments)
    for name, want in wanted.items():
        if name not in own or own[name].shape != want.shape:
            raise UnsupportedModel(f"its {name} has another shape than expected")
        if not is_close(own[name], want, rounding):
            raise UnsupportedModel(f"its {name} is another one then")
    return own


def _shared(plan: BlockPlan, ranges: TokenRanges, name: str, leaf: object) -> object:
    """Return an argument of the block for the tokens of `ranges`."""
    if plan.mixing is not None and name in plan.mixing.counts_along(ranges.across):
        return ranges.num_rows
    if name in plan.counts and isinstance(leaf, int):
        return leaf - ranges.num_tokens + ranges.count
    if name in plan.bounds and isinstance(leaf, int):
        return ranges.before(leaf)
    rows = plan.inputs.get(name)
    return leaf if rows is None or not isinstance(leaf, Tensor) else rows.cut(leaf, ranges)


def rounding_of(arguments: CallArguments) -> float:
    """Return the relative rounding error of a block's arguments, in units of the largest value."""
    return max(ROUNDING.get(x.dtype, TOLERANCE) for x in arguments.tensors().values())


def _same_grid(mixing: TokenMixing, own: Observed, whole: Observed, ranges: TokenRanges) -> None:
    """Raise UnsupportedModel where tokens are in order but in other rows, since a wrong argument counts the rows."""
    ours, by_frames = ranges.num_rows, ranges.across.rows is not None
    for number in (*mixing.convolutions, *mixing.frame_convolutions):
        name = f"convolution {number} grid"
        planes, rows, columns = whole[name].shape[2:]
        if number in mixing.convolutions:
            wanted = (ours, rows, columns) if by_frames else (planes, ours, columns)
        else:
            wanted = (planes, ours, columns) if by_frames else (planes, rows, columns * ours // ranges.starts[-1])
        if own[name].shape[2:] != wanted:
            raise UnsupportedModel(f"its {name} has other rows and columns than expected")


def _mixing_observed(mixing: TokenMixing, whole: Observed) -> Iterator[tuple[str, TokenRows]]:
    for number in mixing.sums:
        for name, dim in ((f"product {number} left", -1), (f"product {number} right", -2), (f"sum {number} terms", -1)):
            if name in whole:
                yield name, TokenRows(whole[name].ndim + dim)
    for number in (*mixing.convolutions, *mixing.frame_convolutions):
        yield f"convolution {number} cells", TokenRows(2)


def _rows_observed(plan: BlockPlan, whole: Observed) -> Iterator[tuple[str, TokenRows | None]]:
    """Yield what to compare and its rows of tokens; masks are not compared."""
    for number, call in enumerate(plan.attentions):
        yield f"attention {number} query", call.queries
        yield f"attention {number} key", call.keys
        yield f"attention {number} value", call.keys
    if plan.mixing is not None:
        yield from _mixing_observed(plan.mixing, whole)
    for part in plan.replicated:
        names = (name for name in whole if name.startswith(part_argument(part.path, "")))
        yield from ((name, part.inputs.get(name.removeprefix(part_argument(part.path, "")))) for name in names)
    for name in whole:
        if name.startswith("output"):
            yield name, plan.outputs.get(int(name.split()[1]))


def is_close(x: Tensor, y: Tensor, rounding: float) -> bool:
    """Whether x and y, of the same shape, agree up to the rounding of products over another number of rows.

    The error of a wrong row is far larger. `rounding`: that of the block's arguments, relative to the largest value; y
    may have a finer dtype, as sums of linear attention do, but its inputs have been rounded so.
    """
    allowed = max(rounding, ROUNDING.get(y.dtype, TOLERANCE))
    if not (y.is_floating_point() or y.is_complex()):
        return torch.equal(x, y)
    return not y.numel() or bool((x - y).abs().max() <= allowed * y.abs().max())
