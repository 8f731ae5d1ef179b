"""Stale keys and values as messages that one kernel writes: averages and differences, where they are sent from.

For operations of all ranks, whose messages lie in buffers that stay. See `kernels.pack_tokens`.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import Received
from patchpar.comm.known_exchange import KnownExchange, MessagePlan, Specs
from patchpar.comm.transport import TensorSpec
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.plan.kv_selection import PooledRows
from patchpar.shard.attention.token_messages import DeltaMessages, TokenMessages
from patchpar.shard.kernels.pack_tokens import UNIT, Window, WindowRun, repeated_packing, run_numbers
from patchpar.shard.stale.quantized_delta import delta_specs
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_grid import windows_of

Pieces = tuple[PooledRows, ...]


class PackedTokens:
    """Windows over tokens, and where their averages go: without `runs`, one after the other in a buffer.

    `numbers`: what it needs of them on the device.
    """

    def __init__(self, windows: tuple[Window, ...], runs: tuple[WindowRun, ...] = ()) -> None:
        runs = runs or (WindowRun(0, len(windows), ((0, 0),)),)
        self._pool = max(max(window.rows, window.columns) for window in windows)
        self._runs, self._num_runs = tuple(run_numbers(runs)), len(runs)
        self._size, self._pack = len(windows) * len(Window._fields), repeated_packing()
        self.numbers = (*(number for window in windows for number in window), *self._runs)

    def use(self, numbers: Tensor) -> Tensor:
        """Take the `numbers` [...], on the device, and return those after them."""
        end = self._size + len(self._runs)
        self._windows = numbers[: self._size].view(-1, len(Window._fields))
        self._table = numbers[self._size : end].view(self._num_runs, -1)
        return numbers[end:]

    def write(self, buffer: Tensor, tokens: Tensor, copy: Tensor | None = None, bits: int = 16) -> None:
        """Write averages of `tokens` [l, 2, B, N, D], or their differences to a `copy`, to `buffer` [bytes]."""
        self._pack(buffer, tokens, copy, self._windows, self._table, self._runs, self._pool, bits)


class PackedMessages(DeltaMessages):
    """The exchange of averages, or of differences, of one exchange point of a layout that `packs`.

    `like`: a tensor of any shape, of the tokens' dtype and on their device.
    """

    def __init__(self, layout: StaleLayout, like: Tensor) -> None:
        super().__init__(layout)
        self._device, self._dtype = like.device, like.dtype
        self._plan = MessagePlan(layout.axis, self._sent(), self._expected(), to_all=self._to_all)
        windows = tuple(
            window for pieces in layout.receivers for window in windows_of(pieces, layout.grid, layout.axis.rank)
        )
        self._sending, self._copying, self._storing = PackedTokens(windows, tuple(self._runs())), None, None
        self._held: Tensor | None = None  # by the receivers, of own tokens
        if self._bits < 16:
            self._copying, self._held = PackedTokens(windows), like.new_empty(len(windows), *layout.token)
        if not self._to_all:
            self._storing = PackedTokens(tuple(self._windows_of_others()))
        self._packed = [each for each in (self._sending, self._copying, self._storing) if each is not None]
        self.numbers = [number for each in self._packed for number in each.numbers]
        self._known: KnownExchange | None = None

    _copying: PackedTokens | None
    _storing: PackedTokens | None

    def _specs(self, pieces: Pieces) -> Specs:
        """Return the specs of a message of these pieces of tokens."""
        shape = (self._layout.num_tokens(pieces), *self._layout.token)
        return (TensorSpec(shape, self._dtype),) if self._bits == 16 else delta_specs(shape, self._bits)

    def _sent(self) -> dict[int, Specs]:
        return {peer: self._specs(pieces) for pieces, peers in self._layout.receivers.items() for peer in peers}

    def _expected(self) -> dict[int, Specs]:
        layout, mine = self._layout, self._axis.rank
        senders = (p for p in self._axis.others if layout.attended.counts[p])
        return {self._axis.ranks[p]: self._specs(layout.pieces(p, mine)) for p in senders}

    def _runs(self) -> Iterator[WindowRun]:
        """Yield what is sent: the same windows to some ranks, once where these get one message together."""
        first = 0
        for pieces, peers in self._layout.receivers.items():
            offsets = dict.fromkeys(self._offset_to(peer) for peer in peers)
            yield WindowRun(first, self._layout.num_tokens(pieces), tuple(offsets))
            first += self._layout.num_tokens(pieces)

    def _offset_to(self, peer: int) -> tuple[int, int]:
        """Return the first units of the values, or of levels and scales, of the message to a global rank."""
        values, *scales = self._plan.offsets[peer]
        return values // UNIT, scales[0] // UNIT if scales else 0

    def _windows_of_others(self) -> Iterator[Window]:
        """Yield windows over the tokens of all ranks, those that others would send, in the order of the newest ones."""
        layout, mine = self._layout, self._axis.rank
        for p, count in enumerate(layout.newest.counts):
            if count:
                pieces = (PooledRows(0, layout.grid.rows(p)),) if p == mine else layout.pieces(p, mine)
                start = layout.fresh.starts[p]
                for window in windows_of(pieces, layout.grid, p):
                    yield window._replace(first=start + window.first)

    def use(self, numbers: Tensor) -> None:
        """See TokenMessages."""
        for each in self._packed:
            numbers = each.use(numbers)

    def store(self, fresh: Tensor, newest: Tensor) -> None:
        """See TokenMessages: `fresh` and `newest` [T, 2, B, N, D] likewise."""
        assert self._storing is not None, "all tokens of a rank are stored as they are"
        self._storing.write(_bytes_of(newest), fresh)

    def remember(self, own: Tensor) -> None:
        """See TokenMessages; `own` [l, 2, B, N, D]."""
        if self._copying is not None and self._held is not None:
            self._copying.write(_bytes_of(self._held), own)

    def start(
        self, comm: Communicator, where: str, own: Tensor, newest: Tensor, memory: MessageMemory
    ) -> Callable[[], Received]:
        """Send of tokens `own` [l, 2, B, N, D], and receive for `newest` [T, 2, B, N, D]; both the same in every step.

        Returns a function that waits. `memory`: of the exchange point's messages.
        """
        known = self._known
        if known is None:
            fills = self._bits == 16 and not self._holds_own
            known = self._plan.known("kv", where, memory, self._device, newest if fills else None)
            self._known = known
        self._sending.write(known.sent.buffer, own, self._held, self._bits)
        pending = comm.repeat(known)

        def wait() -> Received:
            pending.wait()
            return known.tensors

        return wait

    def arrived(self, received: Received, newest: Tensor) -> None:
        """Make what has come elsewhere the newest tokens [T, 2, B, N, D], or add it to them."""
        if self._bits < 16:
            super().arrived(received, newest)
            return
        for p in self._axis.others:
            if of_rank := received.get(self._axis.ranks[p]):
                self._layout.newest.of(newest, p).copy_(of_rank[0])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies that receivers have of own tokens [K, 2, B, N, D], if differences to these are sent."""
        if self._held is not None:
            yield self._held


def messages_of(layout: StaleLayout, like: Tensor) -> TokenMessages:
    """Return the exchange of one exchange point. `like`, of any shape, has the dtype and the device of its tokens."""
    if layout.packs:
        return PackedMessages(layout, like)
    return DeltaMessages(layout) if layout.options.bits < 16 else TokenMessages(layout)


def _bytes_of(tokens: Tensor) -> Tensor:
    """Return contiguous tokens, of any shape, as [bytes]."""
    return tokens.view(-1).view(torch.uint8)
