"""One denoising step on several ranks: each has some tokens of every frame, and in attention all tokens of some heads.

    2 frames of 4 tokens, 2 ranks     outside of attention      a a b b | a a b b
                                      inside                    heads of a: all tokens      heads of b: all tokens

An all-to-all exchanges tokens for heads before each self-attention, and another one back after it (DeepSpeed-Ulysses,
arXiv:2309.14509). The KV window is split by heads and is never sent, so that traffic does not depend on its length.

Shapes: B batch, L tokens of a block, l this rank's, N heads, n this rank's, D width of a token, d of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.errors import PlanError
from patchpar.plan.bands import Bands, split_bands
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.head_exchange import HeadAssignment, head_exchange, split_heads

See = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of all tokens of some heads: queries, keys, values and output [B, L, n, d]."""


def check_inner(ranks: int, *, heads: int, tokens: int | None = None) -> None:
    """Raise PlanError if a step with so many heads, and tokens per frame, cannot be split among `ranks` ranks."""
    if ranks > heads:
        raise PlanError(
            f"inner={ranks}: a step is split by attention heads, and this transformer has {heads}: use at most "
            f"inner={heads}"
        )
    if tokens is not None and ranks > tokens:
        raise PlanError(
            f"inner={ranks}: a frame of {tokens} tokens cannot be split among {ranks} ranks: use at most "
            f"inner={tokens}, or larger frames"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedFrames:
    """One forward pass over `frames` frames. Each rank on `axis` has one of `bands` of every frame's tokens."""

    comm: Communicator
    axis: Axis
    frames: int
    bands: Bands

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.frames * self.bands.size(group_rank) for group_rank in range(self.axis.size))

    def own(self, hidden_BLD: Tensor) -> Tensor:
        """Return this rank's tokens [B, l, D] of all tokens [B, L, D]."""
        start, size = self.bands.starts[self.axis.rank], self.bands.size(self.axis.rank)
        return torch.unflatten(hidden_BLD, 1, (self.frames, -1)).narrow(2, start, size).flatten(1, 2)

    def whole(self, where: str, hidden_BlD: Tensor) -> Tensor:
        """All-gather tokens [B, l, D] to [B, L, D] in the order of frames. Raises ExchangeError."""
        gathered = AllGather(self.comm, self.axis, "tokens", where).parts(hidden_BlD.contiguous(), 1, self.sizes)
        return self._by_frame(torch.cat(gathered, 1), 1)

    def attend(self, where: str, qkv_BlNd: tuple[Tensor, Tensor, Tensor], see: See) -> Tensor:
        """Return `see` of our tokens [B, l, N, d], called with all tokens of our heads. Raises ExchangeError."""
        q, k, v = (x.transpose(1, 2) for x in qkv_BlNd)
        exchange = head_exchange(self.axis, self.sizes, (q.shape[0], q.shape[1], q.shape[3]), k.shape[1])
        ours = exchange.to_heads(self.comm, where, (q, k, v))
        seen = (self._by_frame(x, 2).transpose(1, 2) for x in ours)
        out_BnLd = self._by_rank(see(*seen).transpose(1, 2), 2)
        return exchange.to_tokens(self.comm, where, out_BnLd).transpose(1, 2)

    def _by_frame(self, x: Tensor, dim: int) -> Tensor:
        """Reorder tokens from rank by rank to frame by frame."""
        parts = [torch.unflatten(part, dim, (self.frames, -1)) for part in torch.split(x, list(self.sizes), dim)]
        return torch.cat(parts, dim + 1).flatten(dim, dim + 1)

    def _by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Reorder tokens from frame by frame to rank by rank."""
        sizes = [size // self.frames for size in self.sizes]
        parts = torch.split(torch.unflatten(x, dim, (self.frames, -1)), sizes, dim + 1)
        return torch.cat([part.flatten(dim, dim + 1) for part in parts], dim)


class StepGroup:
    """The ranks of one denoising step."""

    def __init__(self, comm: Communicator, axis: Axis) -> None:
        self._comm, self.axis = comm, axis

    @property
    def ranks(self) -> int:
        return self.axis.size

    def heads(self, heads: int) -> HeadAssignment:
        """Return which of `heads` attention heads this rank has. Raises PlanError."""
        check_inner(self.ranks, heads=heads)
        return split_heads(heads, heads, self.ranks)[self.axis.rank]

    def of_frames(self, frames: int, tokens: int) -> ShardedFrames:
        """Return the sharding of a forward pass over `frames` frames of `tokens` tokens each. Raises PlanError."""
        check_inner(self.ranks, heads=self.ranks, tokens=tokens)
        bands = split_bands(tokens, self.ranks, 1)
        return ShardedFrames(comm=self._comm, axis=self.axis, frames=frames, bands=bands)
