"""Stale keys and values that their owners send in the step that reads them, as `shard.stale.send_window` says.

A rank stores its own tokens of the last step, and of the step before where tokens are extrapolated: by their owner, who
knows how far along their line they went in the last step. What it receives is of no use after the attention. So of
P ranks each stores two of P parts of all tokens, where it would be two of P - 1 other ranks'. Corrections sample own
tokens where they lie.
"""

from collections.abc import Iterator

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport import Work
from patchpar.shard.attention.stale_kv import RemoteTokens
from patchpar.shard.attention.stale_partials import KeysValues
from patchpar.shard.stale.correction import OwnTokens
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.shard.stale.workspace import Workspace


class LateTokens(RemoteTokens):
    """As RemoteTokens, of a layout that `is_late`. `index`: place of the exchange point in its window.

    `like`: a tensor of any shape, with the dtype and the device of the tokens.
    """

    def __init__(self, layout: StaleLayout, like: Tensor, workspace: Workspace) -> None:
        super().__init__(layout, like, workspace)
        self.index = 0
        self._mine, self._newest_shape = self.axis.rank, (self._newest_slots.total, *self._token)
        self._unsent = self._owned.last
        self._gather: Work[Tensor] | None = None

    def _new_newest(self, like: Tensor) -> Tensor:
        """Return no memory, see `receive_into`, but allocate that of own tokens."""
        shape = (self.grid.num_tokens(self.axis.rank), *self._token)
        self._owned = OwnTokens(like.new_empty(shape), like.new_empty(shape) if self.options.extrapolated else None)
        return self._owned.last[:0]

    def _kept_own(self) -> OwnTokens | None:
        return self._owned if self.corrects else None

    def _message_of_own(self) -> Tensor | None:
        return None if self.corrects else self._owned.last  # written when it has been sampled

    def _written(self, into: Tensor, slots: TokenSlots, here: KeysValues) -> Tensor:
        if not self.corrects:
            self._step_own_back()
        return super()._written(into, slots, here)

    def _step_own_back(self) -> None:
        assert self._owned.before is not None, "tokens that are not corrected are sent late where they are extrapolated"
        self._owned.before.copy_(self._owned.last)

    def receive_into(self, memory: Workspace, ratio: Tensor) -> None:
        """Receive the newest tokens into `memory` from now on, where this rank's are extrapolated by `ratio`.

        `ratio`: length of this step over that of the last, a scalar in fp32.
        """
        newest = memory.take(self._newest_shape, self._owned.last)
        if newest is not self._newest:  # the same memory in every step
            self._newest = newest
            self._unsent = self._owned.last if self._owned.before is None else self._newest_slots.of(newest, self._mine)
        if self._owned.before is not None:
            self._past.extrapolate(self._unsent, self._owned, ratio)

    def late_part(self) -> ExchangePart:
        """Return what this rank sends and receives now."""
        return self._messages.part(self._unsent, self._newest)

    def gather(self, comm: Communicator, where: str) -> None:
        """Send this rank's tokens to all ranks, and receive theirs, where `rows` says: until `receive`, or a wait."""
        self._gather = comm.all_gather(self.axis, "kv", where, self._unsent, into=self._newest, bulk=True)

    def receive(self) -> Received:
        """Wait for what `gather` has started. Raises ExchangeError."""
        gather, self._gather = self._gather, None
        assert gather is not None, "whoever has taken it waits for it"
        gather.wait()
        return {}

    def take_gather(self) -> Work[Tensor] | None:
        """Return what `gather` has started, for the caller to wait for after it has written this rank's next tokens.

        None where it sends these as they lie, so that they must not be written before.
        """
        if self._owned.before is None:
            return None
        gather, self._gather = self._gather, None
        return gather

    def remember(self, fresh: Tensor, ratio: Tensor, *, continues: bool) -> None:
        """See RemoteTokens; `fresh` [T, 2, B, N, D]. Of the others' tokens nothing is stored."""
        self._past.remember(self.layout.fresh.of(fresh, self.axis.rank), continues=continues, ratio=ratio)
        if not (self.corrects or continues):
            self._step_own_back()

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor stored for the next step, of any shape."""
        yield from super().tensors()
        yield from (x for x in self._owned if x is not None)

    def arriving(self) -> Iterator[Tensor]:
        """Yield nothing: the tensors [bytes] that tokens are received into belong to the window."""
        return iter(())
