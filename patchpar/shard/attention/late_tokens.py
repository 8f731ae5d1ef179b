"""Stale keys and values that their owners send in the step that reads them, as `shard.stale.send_window` says.

A rank stores its own tokens of the last step, and those of the others of the step before, where it extrapolates. What
it receives is of no use after the attention. Corrections sample its own tokens where they lie until they are sent.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart
from patchpar.shard.attention.stale_kv import RemoteTokens
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.workspace import Workspace


class LateTokens(RemoteTokens):
    """As RemoteTokens, of a layout that `is_late`. `index`: place of the exchange point in its window.

    `like`: a tensor of any shape, with the dtype and the device of the tokens.
    """

    def __init__(self, layout: StaleLayout, like: Tensor, workspace: Workspace) -> None:
        super().__init__(layout, like, workspace)
        self.index = 0
        self._is_behind = False  # whether what is stored of the others is older than what they have not sent

    def _new_newest(self, like: Tensor) -> Tensor:
        """Return no memory, see `receive_into`, but allocate that of own tokens."""
        self._unsent = like.new_empty(self.grid.num_tokens(self.axis.rank), *self._token)
        return self._unsent[:0]

    def _sampled_message(self) -> Tensor | None:
        return self._unsent if self.corrects else None

    def _message_of_own(self) -> Tensor | None:
        return None if self.corrects else self._unsent  # written when it has been sampled

    def receive_into(self, memory: Workspace) -> None:
        """Receive the newest tokens into `memory` from now on."""
        self._newest = memory.take((self._newest_slots.total, *self._token), self._unsent)

    @property
    def unsent(self) -> Tensor:
        """This rank's tokens of the last step, [l, 2, B, N, D]: they must not change while they are sent."""
        return self._unsent

    def late_part(self) -> ExchangePart:
        """Return what this rank sends and receives now."""
        return self._part_of(self._unsent)

    def needs_last(self, *, continues: bool, next_is_exact: bool) -> bool:
        """Whether an exact step receives the others' tokens of the last step, from which the next one extrapolates.

        Arguments as of `remember`.
        """
        return self._previous is not None and self._is_behind and continues and not next_is_exact

    def remember(self, fresh: Tensor, *, continues: bool, next_is_exact: bool = False) -> None:
        """See RemoteTokens; `fresh` [tokens, 2, B, N, D].

        The others' fresh tokens are stored where they are the older ones of the next step.
        """
        self._past.remember(self.layout.fresh.of(fresh, self.axis.rank), continues=continues)
        if self._previous is None:
            return
        if not continues or next_is_exact:
            for run in self._runs:
                run.of(self._previous, run.previous).copy_(run.of(fresh, run.attended))
            self._is_behind = False
        elif self._is_behind:
            self._step_back()
        else:
            self._is_behind = True

    def refresh(self, attended: Tensor, ratio: Tensor, fits: Tensor | Sequence[Tensor] | None) -> None:
        """See RemoteTokens; `attended` [tokens, 2, B, N, D]. The tokens received become the previous ones."""
        super().refresh(attended, ratio, fits)
        self._is_behind = True

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor stored for the next step, of any shape."""
        yield from super().tensors()
        yield self._unsent

    def arriving(self) -> Iterator[Tensor]:
        """Yield nothing: the tensors [bytes] that tokens are received into belong to the window."""
        return iter(())
