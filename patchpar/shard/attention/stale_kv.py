"""Stale keys and values of the other ranks, for attention beside this rank's fresh ones.

    newest      tokens as received, [tokens, 2, B, N, D] in the order of ranks; the next ones are received into it
    previous    those of the step before, where tokens are extrapolated
    attended    what attention reads: this rank's fresh tokens among the others' extrapolated and corrected ones

Where nothing is extrapolated or corrected, `newest` is a part of `attended`. Else all exchange points have one buffer
for `attended`, since it is of no use after the attention. All tokens of an exchange point are of one guidance call.

Where tokens are sent late, in the step that reads them, each rank stores its own until then and extrapolates them
itself: there is no `previous`, and `newest` is memory that exchange points share. See `shard.attention.late_tokens`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport import TensorSpec
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.plan.kv_selection import AllRows, KVSelection, PooledRows
from patchpar.shard.attention.packed_messages import PackedMessages, messages_of
from patchpar.shard.attention.stale_partials import KeysValues
from patchpar.shard.attention.token_buffer import TokenViews, attend_to_tokens
from patchpar.shard.kernels.correct_matrices import correct_by_matrices, correct_matrices
from patchpar.shard.kernels.correct_tokens import RunOfRanks, correct_run, correct_tokens, repeated_correction, table_of
from patchpar.shard.kernels.write_tokens import write_tokens
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.correction import OwnPast, OwnTokens, numbers_of
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_grid import log_weights, take, take_bias
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.shard.stale.workspace import Workspace


class RemoteTokens:
    """The other ranks' selected stale tokens, and what attention reads of them.

    `like`: a tensor of any shape, of their dtype and on their device. `workspace`: memory for `attended`.
    """

    def __init__(self, layout: StaleLayout, like: Tensor, workspace: Workspace) -> None:
        self.layout, self.options, self.axis, self.grid = layout, layout.options, layout.axis, layout.grid
        self.corrects = self.options.correction != "none"  # whether ranks send corrections of their tokens
        self._workspace, self._token, self._slots = workspace, layout.token, layout.attended
        self._shape = (self._slots.total, *self._token)
        self.derived, self._newest_slots = layout.derived, layout.newest
        self._common_here = layout.common_here(layout.axis.rank)
        self._kept = None if self.derived else like.new_empty(self._shape)
        self._newest = self._new_newest(like)
        has_previous = self.options.extrapolated and not layout.is_late
        self._previous = like.new_empty(layout.previous.total, *self._token) if has_previous else None
        slots, mine = (self._slots, self._newest_slots, layout.previous), self.axis.rank
        self._runs = [RunOfRanks(*run, *(each.starts[run.first] for each in slots)) for run in self._slots.others(mine)]
        self._flat_runs = tuple(number for run in self._runs for number in run)
        self._messages = messages_of(layout, like)
        self._table = self._put_on(like.device)
        self._bias, self._views, self._correct = self._make_bias(like), TokenViews(), repeated_correction()
        self._past = OwnPast(self.options.correction, extrapolated=self.options.extrapolated, kept=self._kept_own())

    def _new_newest(self, like: Tensor) -> Tensor:
        """Return memory for the newest tokens."""
        if self._kept is not None:
            return self._kept[self._slots.common :]
        return like.new_empty(self._newest_slots.total, *self._token)

    def _put_on(self, device: torch.device) -> Tensor:
        """Return the table of the runs [ranks, 5] on the device, where the numbers of messages come with it."""
        table = table_of(self._runs if self.derived else [])
        numbers = torch.tensor(self._messages.numbers, dtype=torch.int32)
        found = torch.cat([table.view(-1), numbers]).to(device, non_blocking=True)
        self._messages.use(found[table.numel() :])
        return found[: table.numel()].view(table.shape)

    def _make_bias(self, like: Tensor) -> Tensor | None:
        """Return the logit bias of every token attended to; None where all have weight 1."""
        if not self.layout.averages:
            return None
        mine, ranks = self.axis.rank, range(self.axis.size)
        whole = (PooledRows(0, self.grid.rows(mine)),)
        pieces = [whole if p == mine else self.layout.pieces(p, mine) for p in ranks]
        bias = torch.cat([log_weights(each, self.grid.across) for each in pieces])
        bias = torch.cat([bias.new_zeros(self._slots.common), bias])
        return bias.to(like.device, like.dtype, non_blocking=True)

    def remember(self, fresh: Tensor, ratio: Tensor, *, continues: bool) -> None:
        """Store the tokens of an exact step, [T, 2, B, N, D], see `write_fresh`.

        `ratio` as in `fit`. `continues`: the step before belongs to the same image.
        """
        own = self.layout.fresh.of(fresh, self.axis.rank)
        self._past.remember(own, continues=continues, ratio=ratio)
        if continues:
            self._step_back()
        if fresh is not self._kept:
            self._store(fresh)
        if not continues:
            self._step_back()
        self._messages.remember(own)

    def _store(self, fresh: Tensor) -> None:
        """Make the tokens of an exact step, [T, 2, B, N, D], the newest ones."""
        if self.options.selection == AllRows():
            for run in self._runs:
                run.of(self._newest, run.newest).copy_(run.of(fresh, run.attended))
        else:
            self._messages.store(fresh, self._newest)

    def _step_back(self) -> None:
        """Make the newest tokens the previous ones."""
        if self._previous is not None:
            for run in self._runs:
                run.of(self._previous, run.previous).copy_(run.of(self._newest, run.newest))

    def write(self, here: KeysValues) -> Tensor:
        """Write the local tokens to what attention reads, [tokens, 2, B, N, D], and return all of that.

        To the message as well, where all own tokens are sent as they are.
        """
        attended = self._workspace.take(self._shape, here.k_BlND) if self._kept is None else self._kept
        return self._written(attended, self._slots, here)

    def write_fresh(self, here: KeysValues) -> Tensor:
        """As `write`, to memory for the tokens of all ranks, [T, 2, B, N, D]: common ones first, then in their order.

        It is what attention reads, or else new.
        """
        slots = self.layout.fresh
        if slots == self._slots:
            return self.write(here)
        return self._written(here.k_BlND.new_empty(slots.total, *self._token), slots, here)

    def _written(self, into: Tensor, slots: TokenSlots, here: KeysValues) -> Tensor:
        start, common = self._common_here
        write_tokens(into, *here, slots.starts[self.axis.rank], common, self._message_of_own(), start)
        return into

    def _kept_own(self) -> OwnTokens | None:
        """Return where own tokens are kept, if their samples are read there."""
        return None

    def _message_of_own(self) -> Tensor | None:
        """Return where own tokens [l, 2, B, N, D] lie until they are sent, if not in what attention reads."""
        mine = self.axis.rank
        return self._newest_slots.of(self._newest, mine) if self.derived and self._newest_slots.counts[mine] else None

    def _own(self, attended: Tensor) -> Tensor:
        """Return this rank's tokens [l, 2, B, N, D] of what attention reads."""
        return self._views.part(attended, self._slots.starts[self.axis.rank], self._slots.counts[self.axis.rank])

    def text_rows(self, attended: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the text [t, 2, B, N, D] in what attention reads, and this rank's part; None if parts are unequal."""
        text = self.layout.text
        return self._views.rows(attended, text, self.axis.rank) if text is not None and text.are_equal else None

    @property
    def rows(self) -> Tensor | None:
        """What all ranks gather for the next step, [P l, 2, B, N, D]; None where they do not send all of equally many.

        This rank's part of it has its tokens.
        """
        return self._newest if self.layout.gathers else None

    def part(self, attended: Tensor) -> ExchangePart:
        """Return what is sent of `attended` [tokens, 2, B, N, D], which must not change meanwhile, and received."""
        return self._messages.part(self._sent_of(attended), self._newest)

    def start(
        self, comm: Communicator, where: str, attended: Tensor, memory: MessageMemory
    ) -> Callable[[], Received] | None:
        """Send and receive as `part` says, where one kernel writes the messages, in `memory`; None where none does.

        Returns a function that waits. `attended` [tokens, 2, B, N, D].
        """
        if not isinstance(self._messages, PackedMessages):
            return None
        return self._messages.start(comm, where, self._own(attended), self._newest, memory)

    def _sent_of(self, attended: Tensor) -> Tensor:
        """Return where own tokens [l, 2, B, N, D] are sent from."""
        message = self._message_of_own() if self.options.bits == 16 else None
        return self._own(attended) if message is None else message

    def arrived(self, received: Received) -> None:
        """Make what has been received, tensors of any shape by global rank, the newest tokens of the others."""
        if received:
            self._messages.arrived(received, self._newest)

    def fit(self, attended: Tensor, ratio: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the correction of this rank's tokens to send, [2, B, N, numbers], in `into` if that is given.

        Once for each step. `ratio`: length of this step over that of the last, a scalar in fp32.
        """
        return self._past.fit(self._own(attended), ratio, into)

    def fit_rows(self, memory: Workspace) -> tuple[Tensor, Tensor] | None:
        """Return memory for the corrections of all ranks [P, 2, B, N, numbers], and this rank's part of it.

        None where each rank's are sent from memory of their own.
        """
        if not self.layout.fit_bytes:
            return None
        rows = memory.take((self.axis.size, *self.fit_specs[0].shape), self._newest)
        return rows, self._views.row(rows, self.axis.rank)

    @cached_property
    def fit_specs(self) -> tuple[TensorSpec, ...]:
        """The specs of the corrections that ranks send, in the order of group ranks."""
        numbers = [self._past.numbers(tokens, self._token[-1]) for tokens in self.grid.sizes]
        return tuple(TensorSpec((*self._token[:-1], each), self._newest.dtype) for each in numbers)

    @cached_property
    def fits_are_equal(self) -> bool:
        """Whether all corrections have the same shape."""
        return len(set(self.fit_specs)) == 1

    def refresh(self, attended: Tensor, ratio: Tensor, fits: Tensor | Sequence[Tensor] | None) -> None:
        """Write the other ranks' tokens to what attention reads, extrapolated and corrected.

        `ratio` as in `fit`; `fits` [2, B, N, numbers] of every group rank.
        """
        if not self.derived or self.layout.joins:
            return
        if self.options.correction != "linear":
            assert fits is None or isinstance(fits, Tensor), "affine fits are of equal shapes"
            self._correct(attended, self._newest, self._previous, fits, ratio, self._table, self._flat_runs)
            return
        assert fits is not None
        if isinstance(fits, Tensor) and fits.shape[-1] == numbers_of("linear", self._token[-1]):
            correct_matrices(attended, self._newest, self._previous, fits, ratio, self._table, self._flat_runs)
            return
        for run in self._runs:
            into, newest = run.of(attended, run.attended), run.of(self._newest, run.newest)
            previous = None if self._previous is None else run.of(self._previous, run.previous)
            fit = torch.stack(list(fits[run.first : run.first + run.ranks]))
            affine = fit.shape[-1] == numbers_of("affine", self._token[-1])
            (correct_run if affine else correct_by_matrices)(into, newest, previous, fit, ratio)
            if previous is not None:
                previous.copy_(newest)

    def repeat(self, attended: Tensor, ratio: Tensor) -> None:
        """Write the other ranks' tokens to `attended` [tokens, 2, B, N, D] as received; `ratio` as in `fit`."""
        if self.derived and not self.layout.joins:
            correct_tokens(attended, self._newest, None, None, ratio, self._table, self._flat_runs)

    def attend(self, call: AttentionCall, attended: Tensor) -> Tensor:
        """Return attention [B, N, q, D] of the call's queries to the local tokens and the others'."""
        tokens = self._joined(attended) if self.layout.joins else attended
        bias = call.attn_mask
        mask = None if self._bias is None else self._views.mask(self._bias, call.query.shape[2])
        if bias is not None:
            mask = self._bias_of(bias) if bias.shape[-1] > 1 else bias if mask is None else mask + bias
        return attend_to_tokens(call, tokens, mask, self._views)

    @property
    def _seen(self) -> KVSelection:
        """The selection that is attended to."""
        return self.options.narrow_to or self.options.selection

    def _bias_of(self, bias: Tensor) -> Tensor:
        """Return the columns, common tokens and then rank by rank, for the tokens attended to, averages weighted."""
        mine, grid, common = self.axis.rank, self.grid, self._slots.common
        if self._seen == AllRows():
            return bias
        found = [bias[..., :common]]
        for group_rank in range(self.axis.size):
            columns = bias.narrow(-1, common + grid.start(group_rank), grid.num_tokens(group_rank))
            if group_rank == mine:
                found.append(columns)
            elif pieces := self._seen.pieces(group_rank, mine, grid.rows(group_rank)):
                found.append(take_bias(columns, pieces, grid))
        return torch.cat(found, dim=-1)

    def _joined(self, attended: Tensor) -> Tensor:
        """Return the tokens of all ranks, of the others only the selection attended to, in a new tensor."""
        found = [attended[: self._slots.common]]
        for group_rank in range(self.axis.size):
            if group_rank == self.axis.rank:
                found.append(self._own(attended))
            elif self._slots.counts[group_rank]:
                pieces = self._seen.pieces(group_rank, self.axis.rank, self.grid.rows(group_rank))
                if pieces:
                    found.append(take(self._newest_slots.of(self._newest, group_rank), pieces, self.grid))
        return torch.cat(found)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor stored for the next step, of any shape, but those of `arriving`."""
        if self.options.bits < 16:
            yield self._newest
        yield from (x for x in (self._kept, self._previous, self._bias) if x is not None)
        yield from self._past.tensors()
        yield from self._messages.tensors()

    def arriving(self) -> Iterator[Tensor]:
        """Yield the buffer [tokens, 2, B, N, D] that the next values are received into, where it has no other use."""
        if self.derived and self.options.bits == 16:
            yield self._newest
