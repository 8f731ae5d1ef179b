"""Sums over all tokens and convolutions over their grid, in a block that runs on this rank's tokens.

Both are fresh in every strategy: a sum exchanges one small tensor with every rank, and a convolution the rows next to
ours with the two neighbours.
"""

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather
from patchpar.comm.exchange_part import ExchangePart, Halo, edges_part
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.kv_selection import TokensAcross
from patchpar.shard.precision import wide
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.token_mixing import ConvolutionCall
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.unet.layers import convolve_with_halo, stencil_of

ROWS = -2  # the dim of rows in a grid


def sum_over_ranks(split: TokenSplit, where: str, own: Tensor) -> Tensor:
    """Return the sum over the tokens of all ranks, given `own`, that over ours, of the same shape; added in fp32.

    Raises ExchangeError.
    """
    if split.mode is None or split.axis.size == 1:
        return own
    gathered = AllGather(split.comm, split.axis, "tokens", where).same(own.contiguous())
    return torch.stack([wide(each) for each in gathered]).sum(0).to(own.dtype)


def convolve_rows(split: TokenSplit, where: str, ranges: TokenRanges, convolution: ConvolutionCall) -> Tensor:
    """Return the convolution [B, K, h, W] of our rows of tokens [B, C, h, W].

    Raises UnsupportedModel, PlanError, ExchangeError.
    """
    x_BChW = convolution.x_BCHW
    rows, columns = x_BChW.shape[2:]
    across = ranges.across
    lines = (
        TokensAcross(columns, across.planes) if across.rows is None else TokensAcross(across.columns, rows=across.rows)
    )
    if across != lines or rows != ranges.num_rows or (across.rows is not None and columns != across.num_tokens):
        raise UnsupportedModel(
            f"{where} is over {rows} x {columns} cells, which are no whole rows of our tokens ({ranges}), as they were "
            f"in the search for its tokens"
        )
    stencil = stencil_of(convolution.arguments, ROWS)
    fewest = min(stop - start for start, stop in zip(ranges.starts, ranges.starts[1:], strict=False))
    if split.axis.size > 1 and fewest < stencil.before:
        raise PlanError(
            f"{where} reads {stencil.before} rows of the neighbouring ranks, of which some have {fewest} only: use a "
            f"larger image or fewer ranks"
        )
    halo = Halo(None, None)
    if split.mode is not None and split.axis.size > 1:
        edges = _edges(split, x_BChW, stencil.before)
        _, halo = split.comm.gather_with_edges(split.axis, where, [], edges).wait()
    return convolve_with_halo(convolution.arguments, x_BChW, ROWS, stencil, halo)


def _edges(split: TokenSplit, x_BChW: Tensor, rows: int) -> ExchangePart:
    """Return the exchange of `rows` edge rows with each neighbour."""
    if not rows:
        return edges_part(split.axis)
    first, last = split.axis.rank == 0, split.axis.rank == split.axis.size - 1
    spec = TensorSpec((*x_BChW.shape[:2], rows, x_BChW.shape[3]), x_BChW.dtype)
    return edges_part(
        split.axis,
        first=None if first else x_BChW[:, :, :rows],
        last=None if last else x_BChW[:, :, -rows:],
        before=None if first else spec,
        after=None if last else spec,
    )
