"""Attention of this rank's queries to the other ranks' tokens, cached for several steps.

Belongs to one attention exchange point in one guidance call.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.partial import Partial
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.cache import StaleBytes
from patchpar.shard.stale.stale_layout import check_room, of_calls
from patchpar.shard.stale.token_grid import LevelGrid


class KeysValues(NamedTuple):
    """Keys and values of some tokens, [B, l, N, D] each, in the memory layout of the projections."""

    k_BlND: Tensor
    v_BlND: Tensor

    def specs(self, tokens: int) -> tuple[TensorSpec, ...]:
        """Return the specs of keys and values of so many tokens."""
        return tuple(TensorSpec((x.shape[0], tokens, *x.shape[2:]), x.dtype) for x in self)


class RemotePartials:
    """Attention of this rank's queries to all other ranks' tokens, as of the last refresh.

    Attention over parts of the keys merges exactly by log-sum-exp (ring attention, arXiv:2310.01889); here the remote
    part may be several steps old. DiTFastAttn (NeurIPS 2024) caches attention outside a window like this, on one GPU.
    """

    def __init__(self, refresh: int, axis: Axis, grid: LevelGrid) -> None:
        self.refresh, self.axis, self.grid = refresh, axis, grid
        self._stored: Partial | None = None

    def is_due(self, evaluation: int, layer: int) -> bool:
        """Whether this layer is refreshed in this evaluation."""
        return (evaluation + layer) % self.refresh == 0

    def put(self, remote: Partial) -> None:
        """Store the partial of a refresh, [B, N, l, D] and [B, N, l], where the last one lies."""
        if self._stored is None:
            self._stored = remote
            return
        for stored, new in zip(self._stored, remote, strict=True):
            stored.copy_(new)

    @property
    def remote(self) -> Partial:
        """The cached partial."""
        assert self._stored is not None, "a layer is refreshed in the first, synchronous step"
        return self._stored

    def part(self, own: KeysValues) -> ExchangePart:
        """Return what this rank sends and receives for a refresh in the next step."""
        incoming = {self.axis.ranks[p]: own.specs(self.grid.num_tokens(p)) for p in self.axis.others}
        peers = tuple(incoming)
        return ExchangePart("kv", [(peers, tuple(own))], incoming, axis=self.axis, to_all=True)

    def arriving(self) -> Iterator[Tensor]:
        """Yield no tensor of any shape: a transport allocates what it receives."""
        return iter(())

    def tensors(self) -> Iterator[Tensor]:
        """Yield the cached output [B, N, l, D] and log-sum-exp [B, N, l]."""
        if self._stored is not None:
            yield from self._stored


def first_partials(patch: LocalPatch, where: str, grid: LevelGrid, call: AttentionCall, refresh: int) -> RemotePartials:
    """Return the state of an exchange point that runs for the first time.

    Raises PlanError, before the first of a step, where those of all layers and calls do not fit the memory.
    """
    assert patch.cache is not None
    if patch.cache.is_first_state():
        calls = patch.cache.calls_left
        expected = _expected_bytes(refresh, call, grid, patch.axis, patch.layers_like(where) * calls)
        what = of_calls("attention to others' tokens", calls)
        check_room(expected, patch.axis.size, call.key.device, patch.policy.name, what)
    return RemotePartials(refresh, patch.axis, grid)


def _expected_bytes(refresh: int, call: AttentionCall, grid: LevelGrid, axis: Axis, layers: float) -> StaleBytes:
    """Return the bytes that so many such layers keep, and those of the keys and values that some of them receive."""
    batch, heads, queries, _ = call.query.shape
    width, elsewhere = call.value.shape[3], grid.total_tokens - grid.num_tokens(axis.rank)
    held = batch * heads * queries * (width * call.query.element_size() + torch.float32.itemsize)
    received = sum(batch * elsewhere * x.shape[1] * x.shape[3] * x.element_size() for x in (call.key, call.value))
    return StaleBytes(round(held * layers), received * math.ceil(layers / refresh))
