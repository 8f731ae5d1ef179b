"""Keys and values of tokens in one buffer [tokens, 2, B, N, D]: gathered there, and attended to as they lie.

Shape letters: T tokens of the buffer, l some of them, B batch, N heads, D head width, q queries.
"""

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.stale_partials import KeysValues
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.token_slots import TokenSlots


class TokenViews:
    """Views of the buffer that an attention reads: made again only when it is another buffer than in the last step."""

    def __init__(self) -> None:
        self._keys: tuple[Tensor, Tensor, Tensor] | None = None
        self._part: tuple[Tensor, Tensor] | None = None
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None
        self._row: tuple[Tensor, Tensor] | None = None
        self._mask: Tensor | None = None

    def keys_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, N, T, D] of `tokens` [T, 2, B, N, D]."""
        if self._keys is None or self._keys[0] is not tokens:
            self._keys = (tokens, *keys_values(tokens))
        return self._keys[1:]

    def part(self, tokens: Tensor, start: int, count: int) -> Tensor:
        """Return `count` of `tokens` [T, 2, B, N, D], always the same ones, from `start` on."""
        if self._part is None or self._part[0] is not tokens:
            self._part = tokens, tokens.narrow(0, start, count)
        return self._part[1]

    def rows(self, tokens: Tensor, slots: TokenSlots, group_rank: int) -> tuple[Tensor, Tensor]:
        """Return those of `tokens` [T, 2, B, N, D] that `slots`, always the same, have for all ranks, and for one."""
        if self._rows is None or self._rows[0] is not tokens:
            start = slots.starts[0]
            self._rows = tokens, tokens.narrow(0, start, slots.total - start), slots.of(tokens, group_rank)
        return self._rows[1:]

    def row(self, rows: Tensor, group_rank: int) -> Tensor:
        """Return the row of one rank, always the same, of `rows` [P, ...] of all ranks."""
        if self._row is None or self._row[0] is not rows:
            self._row = rows, rows[group_rank]
        return self._row[1]

    def mask(self, bias: Tensor, queries: int) -> Tensor:
        """Return the logit bias of tokens, always the same [T], for so many queries: [1, 1, q, T]."""
        if self._mask is None or self._mask.shape[2] != queries:
            self._mask = bias.expand(1, 1, queries, -1)
        return self._mask


def keys_values(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of keys and values [B, N, T, D] of `tokens` [T, 2, B, N, D]."""
    key, value = tokens.permute(1, 2, 3, 0, 4).unbind(0)
    return key, value


def attend_to_tokens(
    call: AttentionCall, tokens: Tensor, mask: Tensor | None, views: TokenViews | None = None
) -> Tensor:
    """Return attention [B, N, q, D] of the call's queries to `tokens` [T, 2, B, N, D]; `mask` has their columns."""
    key, value = keys_values(tokens) if views is None else views.keys_values(tokens)
    return call.attend_to(key, value, mask)


def in_batches(tokens: Tensor) -> KeysValues:
    """Return views of the keys and values of `tokens` [l, 2, B, N, D]."""
    return KeysValues(*(x.transpose(0, 1) for x in tokens.unbind(1)))


def fresh_part(axis: Axis, slots: TokenSlots, fresh: Tensor, kind: str = "kv") -> ExchangePart:
    """Return the exchange in which `fresh` [T, 2, B, N, D] gets the tokens of all ranks beside this rank's."""
    peers = tuple(axis.ranks[p] for p in axis.others)
    into = {axis.ranks[p]: (slots.of(fresh, p),) for p in axis.others}
    specs = {rank: (TensorSpec.of(x),) for rank, (x,) in into.items()}
    return ExchangePart(kind, [(peers, (slots.of(fresh, axis.rank),))], specs, into, axis, to_all=True, at_once=True)
