"""How many tokens a block has in a denoiser call, in which grid they lie, and which rank has which."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.block_arguments import ArgumentRule
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.grid import grid_of_table
from patchpar.shard.transformer.probe.latent import latent_shape, latent_size
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_plan import BlockPlan
from patchpar.shard.transformer.token_ranges import TokenGrid, TokenRanges, spread

Grids = dict[tuple[object, ...], TokenGrid | None]


class TokenLayout:
    """The layout of the tokens of one denoiser call. `grids`: those found so far for the image."""

    def __init__(self, split: TokenSplit, arguments: CallArguments, latent: str, grids: Grids) -> None:
        self._split, self._grids = split, grids
        self._latent = (arguments, latent)

    def ranges(self, path: str, plan: BlockPlan, rule: ArgumentRule, leaves: Sequence[Any]) -> TokenRanges:
        """Return the token ranges of a block called with whole arguments. Raises PlanError, UnsupportedModel."""
        tokens, axis = self._num_tokens(path, plan, rule, leaves), self._split.axis
        if tokens < axis.size:
            raise PlanError(
                f"{path} has {tokens} tokens, too few for {axis.size} ranks: use a larger image, or at most {tokens} "
                f"ranks"
            )
        mixing = plan.mixing or TokenMixing()
        in_rows = mixing.reach
        cut = "rows" if in_rows else self._split.cut
        grid = None if cut == "runs" else self._grid(plan, tokens, rule, leaves)
        if in_rows:
            _refuse_without_rows(path, grid, tokens, axis.size, of_video=mixing.of_video)
        return spread(tokens, axis.rank, axis.size, grid=grid, cut=cut, ratio=axis.ratio)

    def text_ranges(self, rule: ArgumentRule, leaves: Sequence[Any], first: int) -> TokenRanges | None:
        """Return the ranges of a second run of tokens beside the `first`; None where every rank computes all of it."""
        if not rule.text:
            return None
        number, rows = rule.text[0]
        tokens = int(leaves[number].shape[rows.dim]) - (first if number in dict(rule.inputs) else 0)
        return self._split.text_ranges(tokens)

    def _num_tokens(self, path: str, plan: BlockPlan, rule: ArgumentRule, leaves: Sequence[Any]) -> int:
        """Count an argument that consists of tokens alone, or else compute it from the size of the latent."""
        is_one_row = False
        for number, rows in rule.inputs:
            if rows.alone:
                size = int(leaves[number].shape[rows.dim])
                if size > 1:  # one row is that of all tokens
                    return size
                is_one_row = True
        if is_one_row:
            return 1
        latent = latent_size(*self._latent)
        exact = plan.ratio * latent
        found = round(exact)
        if abs(exact - found) > 1e-6 * found:
            raise UnsupportedModel(
                f"{path}: a latent of {latent} elements makes {exact:.2f} tokens, not a whole number"
            )
        return found

    def _grid(self, plan: BlockPlan, tokens: int, rule: ArgumentRule, leaves: Sequence[Any]) -> TokenGrid | None:
        """Return the grid of the tokens, found once for an image."""
        shape = latent_shape(*self._latent)
        key = (plan.name, plan.signature, tokens, shape)
        if key not in self._grids:
            self._grids[key] = _find_grid(plan, shape, _table(plan, tokens, rule, leaves))
        return self._grids[key]


def _refuse_without_rows(path: str, grid: TokenGrid | None, tokens: int, ranks: int, *, of_video: bool) -> None:
    """Raise unless a block with convolutions can be split at whole rows of its tokens, or at whole frames."""
    if grid is None or (grid.frames != 1 and not of_video) or grid.num_tokens != tokens:
        raise UnsupportedModel(f"{path} convolves its {tokens} tokens, but the grid they lie in is not known")
    most = max(grid.frames, grid.rows)
    if most < ranks:
        raise PlanError(
            f"{path} has {most} {grid.along} of tokens, too few for {ranks} ranks, since its convolutions need whole "
            f"{grid.along}: use a larger image, or at most {most} ranks"
        )


def _find_grid(plan: BlockPlan, shape: tuple[int, ...] | None, table: tuple[Tensor, int] | None) -> TokenGrid | None:
    if table is not None:
        return grid_of_table(*table)
    return None if plan.origin is None or shape is None else plan.origin.grid(shape)


def _table(plan: BlockPlan, tokens: int, rule: ArgumentRule, leaves: Sequence[Any]) -> tuple[Tensor, int] | None:
    """Return the rows of tokens in the table of their positions, and the dim they are along."""
    if plan.origin is None or plan.origin.table is None:
        return None
    number, rows = dict(zip(plan.inputs, rule.inputs, strict=True))[plan.origin.table]
    return rows.among(leaves[number], tokens), rows.dim
