"""Sizes of what one attention exchange point keeps of stale keys and values, and their refusal where they do not fit.

Both before anything is allocated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from patchpar.errors import PlanError
from patchpar.launch.accelerators import free_bytes
from patchpar.launch.host_memory import free_memory
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.exchange_policy import StaleKV
from patchpar.plan.kv_selection import AllRows, PooledRows
from patchpar.plan.mesh import Axis
from patchpar.shard.kernels.quantize_delta import SCALE
from patchpar.shard.stale.cache import StaleBytes
from patchpar.shard.stale.correction import kind_for, numbers_of, stride_for
from patchpar.shard.stale.send_window import NUM_BUFFERS
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.stale.token_slots import TokenSlots

MEAN_BYTES = 4  # of a number in fp32


@dataclass(frozen=True)
class StaleLayout:
    """Buffers of tokens, each `token` (2, B, N, D) numbers of `itemsize` bytes. `common`: tokens that all ranks have.

    `text`: the tokens of each rank, if the common ones are a text that is split, and gathered in the step that reads.
    `joins`: what is attended to is concatenated for each attention. See `shard.attention.stale_kv`. `may_wait`: own
    tokens may be sent in the step that reads them, see `shard.stale.send_window`.
    """

    options: StaleKV
    axis: Axis
    grid: LevelGrid
    token: tuple[int, int, int, int]
    itemsize: int
    common: int = 0
    joins: bool = False
    may_wait: bool = False
    text: TokenSlots | None = None

    def pieces(self, sender: int, receiver: int) -> tuple[PooledRows, ...]:
        """Return the pieces of one rank's tokens that another receives."""
        return self.options.selection.pieces(sender, receiver, self.grid.rows(sender))

    def num_tokens(self, pieces: tuple[PooledRows, ...]) -> int:
        """Return how many tokens these pieces are."""
        return sum(piece.num_tokens(self.grid.across) for piece in pieces)

    @cached_property
    def derived(self) -> bool:
        """Whether attention reads other memory than what is received, so that the next values may arrive meanwhile."""
        return self.options.extrapolated or self.options.correction != "none" or self.joins

    @cached_property
    def is_late(self) -> bool:
        """Whether own tokens are stored here and sent in the step that reads them: where all are sent as they are."""
        as_they_are = self.options.selection == AllRows() and self.options.bits == 16
        return self.may_wait and self.derived and as_they_are and not self.joins

    @cached_property
    def gathers(self) -> bool:
        """Whether all own tokens are sent as they are, equally many by each rank: one operation, in place."""
        return self.newest.are_equal and self.options.selection == AllRows() and self.options.bits == 16

    @cached_property
    def packs(self) -> bool:
        """Whether one kernel writes what is sent, averages or differences, for one operation of all ranks."""
        return self.may_wait and not self.joins and (self.options.bits < 16 or self.averages)

    def common_here(self, group_rank: int) -> tuple[int, int]:
        """Return where the common tokens that a rank computes begin among all of these, and how many they are."""
        return (0, self.common) if self.text is None else (self.text.starts[group_rank], self.text.counts[group_rank])

    @cached_property
    def fresh(self) -> TokenSlots:
        """The tokens of all ranks, all of them, as they are gathered in an exact step; common ones first."""
        return TokenSlots(self.grid.sizes, self.common)

    @cached_property
    def attended(self) -> TokenSlots:
        """The tokens of all ranks that attention reads, common ones first."""
        mine = self.axis.rank
        counts = [self.num_tokens(self.pieces(p, mine)) for p in range(self.axis.size)]
        counts[mine] = self.grid.num_tokens(mine)
        return TokenSlots(tuple(counts), self.common)

    @cached_property
    def newest(self) -> TokenSlots:
        """The tokens received last, with this rank's own where these are sent as they are."""
        sends_all = self.options.selection == AllRows() and self.options.bits == 16
        keeps_own = sends_all or not self.derived
        return TokenSlots(self.attended.counts) if keeps_own else self.previous

    @cached_property
    def previous(self) -> TokenSlots:
        """The tokens of the other ranks in the step before."""
        return self.attended.without(self.axis.rank)

    @cached_property
    def averages(self) -> bool:
        """Whether any token attended to is an average of several."""
        mine = self.axis.rank
        received = [piece for p in self.axis.others for piece in self.pieces(p, mine)]
        return any(weight > 1 for piece in received for weight in piece.weights(self.grid.across))

    @cached_property
    def receivers(self) -> Mapping[tuple[PooledRows, ...], tuple[int, ...]]:
        """The global ranks that receive the same pieces of this rank's tokens, by pieces."""
        found: dict[tuple[PooledRows, ...], tuple[int, ...]] = {}
        for group_rank in self.axis.others:
            pieces = self.pieces(self.axis.rank, group_rank)
            if pieces:
                found[pieces] = (*found.get(pieces, ()), self.axis.ranks[group_rank])
        return found

    @property
    def num_bytes(self) -> StaleBytes:
        """What the exchange point stores, in bytes.

        Beside that are `message_bytes`. All exchange points share `fit_bytes`; where `derived`, `workspace_bytes` too,
        and where `is_late`, `window_bytes`.
        """
        options, size = self.options, prod(self.token) * self.itemsize
        tokens = 0 if self.derived else self.attended.total
        tokens += self.previous.total if options.extrapolated and not self.is_late else 0
        if options.bits < 16:
            tokens += self.newest.total if self.derived else 0
            tokens += sum(map(self.num_tokens, self.receivers))
        tokens += (1 + options.extrapolated) * self.newest.counts[self.axis.rank] if self.is_late else 0
        bias = self.attended.total * self.itemsize if self.averages else 0
        arriving = self.newest.total * size if self.derived and options.bits == 16 and not self.is_late else 0
        return StaleBytes(tokens * size + self.sample_bytes + bias, arriving)

    @property
    def message_bytes(self) -> int:
        """Bytes of what is sent and received for the next step, beside the tokens: in a step as in the one before.

        Between CPUs only differences that have been received; others are received in place, and sent ones kept nowhere.
        """
        if self.is_late or (self.gathers and not self.joins):
            return 0
        bits, mine, received = self.options.bits, self.axis.rank, self.previous.total
        if not self.may_wait:
            return received * self._bytes_sent(bits) if bits < 16 else 0
        if bits < 16 and self.options.selection == AllRows():  # a gather, which has a row for own ones too
            sent, received = self.grid.num_tokens(mine), received + self.grid.num_tokens(mine)
        else:
            sent = sum(len(peers) * self.num_tokens(pieces) for pieces, peers in self.receivers.items())
            received = received if bits < 16 or self.newest.counts[mine] else 0  # else they come where they are stored
        return (sent + received) * self._bytes_sent(bits)

    def _bytes_sent(self, bits: int) -> int:
        """Return the bytes of a token in a message: of so many bits a number, with a scale for each head."""
        numbers, width = prod(self.token), self.token[-1]
        if bits == 16:
            return numbers * self.itemsize
        return numbers // width * ((width if bits == 8 else -(-width // 2)) + SCALE.itemsize)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of what attention reads, where that is not what is received."""
        return self.attended.total * prod(self.token) * self.itemsize if self.derived else 0

    @cached_property
    def fit_bytes(self) -> int:
        """Bytes of the corrections of all ranks, where one operation gathers them in memory that exchange points share.

        Not of matrices, which are made anew.
        """
        if self.options.correction != "affine" or not self.may_wait:
            return 0
        numbers = prod(self.token[:-1]) * numbers_of("affine", self.token[-1])
        return self.axis.size * numbers * self.itemsize

    @property
    def window_bytes(self) -> int:
        """Bytes that are received into by the exchange points of a window, where they send late."""
        return NUM_BUFFERS * self.newest.total * prod(self.token) * self.itemsize if self.is_late else 0

    @property
    def sample_bytes(self) -> int:
        """Bytes of the means and samples of own tokens that fits are made of, and of fractions of their line."""
        if self.options.correction == "none":
            return 0
        own, numbers = self.grid.num_tokens(self.axis.rank), prod(self.token)
        steps = 1 + self.options.extrapolated
        if self.is_late:  # samples are among all own tokens
            fractions = numbers // self.token[-1] if self.options.extrapolated else 0
            return (numbers * steps + fractions) * MEAN_BYTES
        stride = stride_for(kind_for(self.options.correction, own, self.token[-1]), own)
        return numbers * steps * (MEAN_BYTES + self.itemsize * -(-own // stride))


def expected_bytes(layout: StaleLayout, layers: float) -> StaleBytes:
    """Return the bytes of stale keys and values of a call with the attention of so many such layers."""
    one = layout.num_bytes
    arriving = round(one.arriving * layers) + layout.window_bytes
    shared = layout.workspace_bytes + layout.fit_bytes
    return StaleBytes(round((one.held + layout.message_bytes) * layers) + shared, arriving)


def of_calls(what: str, calls: int) -> str:
    """Return what the layers of so many calls of a step keep, for messages."""
    return what if calls == 1 else f"{what} of {calls} guidance calls"


def check_room(expected: StaleBytes, group_size: int, device: torch.device, strategy: str, what: str) -> None:
    """Raise PlanError if `what` the layers of a call keep does not fit: on the CPU, of all ranks together."""
    ranks, free, memory = 1, free_bytes(device), f"of {device}"
    if device.type == "cpu":
        ranks, free, memory = group_size, free_memory(), f"for {group_size} CPU ranks"
    if free is None or ranks * expected.total <= free:
        return
    raise PlanError(
        f"strategy {strategy} keeps {readable_bytes(expected.held)} of {what} for the next step on each rank, "
        f"and receives {readable_bytes(expected.arriving)} more, but only {readable_bytes(free)} {memory} are free: "
        "use strategy exact, which keeps none, fresh-edges:context=pooled, which keeps averages, or a smaller image"
    )
