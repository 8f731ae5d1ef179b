"""Bytes of one step after the warm-up, as a closed formula of the layers' sizes.

What place j sends to place i, summed over layers. An element has `itemsize` bytes, b is the batch, r_j the rows of j's
band on the map of a layer, a its columns:

    keys, values   2 b N w t    N heads of D numbers; w bytes for those: D itemsize, D + 2 in 8 bits, D/2 + 2 in 4
        t tokens   all          r_j a
                   near band    m a                                      neighbours; nothing to others
                   pooled       m a + ceil((r_j - m) / s) ceil(a / s)    neighbours, with m = max(1, round(share r_j))
                                ceil(r_j / s) ceil(a / s)                others
                   partials     r_j a, of every layer in every refresh-th step
    correction     2 b N D itemsize for the factors, or 2 b N D^2 itemsize for matrices where l >= 4 (D + 1); and
                   2 b N D itemsize for the summands, 2 b N itemsize for the ways along the line; to everyone
    halo           itemsize b C W per row that i reads, neighbours only; published: 2 rows to everyone
    moments        4 (1 + 2 b G), nothing where each place keeps its own; G groups
    prediction     itemsize b C h_j W, and 12 where the drift is told

What place i holds for the next step, n places, l of its tokens:

    keys, values   those it attends to: 2 b N D itemsize for its own tokens and the t of every other place, and itemsize
                   for each of these tokens where some stand for several. Where these are extrapolated or corrected, one
                   layer's worth for all layers; then of every layer what came in the step before the last, where it is
                   extrapolated, and what came last, and its own where all of it is sent as it is: into those the next
                   values come, so that they are counted apart, but for differences, which are added to them. As much
                   again as it sends, once for all ranks that get the same, where differences are sent
    correction     2 b N D (itemsize ceil(l / s) + 4) for what we remember of our own tokens of the last step: every
                   s-th, 1 for matrices and for fewer than 512 tokens, else the whole part of l / 256, and the next
                   number where that is even; and their mean in fp32. Twice where they are extrapolated
    partials       b N l (D itemsize + 4): outputs, and log-sum-exp in fp32
    halo           where it is of the last step: the rows it reads; published: the neighbours' rows, read or not
    moments        where they are of the last step: 4 n (1 + 2 b G)
    drift          4 b N D ceil(l / 16), where it is told
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.volumes.shapes import Attended, Shapes
from patchpar.plan.bands import Bands
from patchpar.plan.exchange_policy import CachedPartials, ExchangePolicy, StaleKV
from patchpar.plan.kv_selection import KVSelection, NearRows, NearRowsAndPooled

KINDS = ("kv", "halo", "moments", "prediction", "correction")
SCALE_BYTES, FLOAT_BYTES, DRIFT_STRIDE = 2, 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """The layers of a denoiser in bands of rows, under one treatment; `itemsize` bytes a number."""

    shapes: Shapes
    bands: Bands
    policy: ExchangePolicy
    itemsize: int

    def sent(self, group_rank: int, evaluation: int = 0) -> Counter[str]:
        """Bytes that leave `group_rank` in that evaluation, by kind, once for each receiver."""
        return _sum(self._between(group_rank, other, evaluation) for other in self._others(group_rank))

    def received(self, group_rank: int, evaluation: int = 0) -> Counter[str]:
        """Bytes that come to `group_rank`."""
        return _sum(self._between(other, group_rank, evaluation) for other in self._others(group_rank))

    def received_per_step(self, group_rank: int) -> dict[str, float]:
        """Bytes that come to `group_rank` in a step, on average over the steps after which they repeat."""
        cycle = cycle_of(self.policy)
        total = _sum(self.received(group_rank, evaluation) for evaluation in range(cycle))
        return {kind: count / cycle for kind, count in total.items()}

    def held(self, group_rank: int) -> Counter[str]:
        """Bytes that `group_rank` keeps for the next step, by kind, beside what is on its way."""
        policy, ranks = self.policy, len(self.bands)
        kept = Counter(dict.fromkeys(KINDS[:3], 0))
        if not policy.remembers:
            return kept
        layers = self.shapes.attentions
        kept["kv"] = sum(self._kept_tokens(layer, group_rank) for layer in layers)
        if self._is_derived:
            kept["kv"] += max(self._attended(layer, group_rank) * self._token_size(layer) for layer in layers)
        if policy.halo == "stale":
            neighbours = sum(abs(other - group_rank) == 1 for other in self._others(group_rank))
            read = sum(self._read_rows(group_rank, other) for other in self._others(group_rank))
            kept["halo"] = neighbours * self._both_rows() // 2 if policy.published else read
        if policy.moments in ("stale", "corrected", "guarded"):
            kept["moments"] = ranks * self._moments()
        return kept

    def arriving(self, group_rank: int) -> int:
        """Bytes into which the next keys and values come, where attention does not read these."""
        context = self.policy.context
        if not self._is_derived or not isinstance(context, StaleKV) or context.bits < 16:
            return 0
        sums = 0
        for layer in self.shapes.attentions:
            own = 0 if self._selects else math.prod(self._grid(layer, group_rank))
            sums += (own + self._arrived(layer, group_rank)) * self._token_size(layer)
        return sums

    @property
    def _selects(self) -> bool:
        """Whether places send anything else than all of their tokens."""
        return isinstance(self._selection, (NearRows, NearRowsAndPooled))

    @property
    def _is_derived(self) -> bool:
        """Whether attention reads something else than what came."""
        context = self.policy.context
        if not isinstance(context, StaleKV):
            return False
        joins = self.policy.published or context.narrow_to is not None
        return joins or context.extrapolated or context.correction != "none"

    def _arrived(self, layer: Attended, group_rank: int) -> int:
        return sum(self._tokens(layer, other, group_rank) for other in self._others(group_rank))

    def _attended(self, layer: Attended, group_rank: int) -> int:
        return math.prod(self._grid(layer, group_rank)) + self._arrived(layer, group_rank)

    def _token_size(self, layer: Attended) -> int:
        """Bytes of the key and the value of one token of every sample, as they are kept."""
        return 2 * layer.batch * layer.heads * layer.width * self.itemsize

    def _others(self, group_rank: int) -> list[int]:
        return [other for other in range(len(self.bands)) if other != group_rank]

    def _between(self, sender: int, receiver: int, evaluation: int) -> Counter[str]:
        policy, shapes = self.policy, self.shapes
        rows = self._both_rows() if policy.published else self._read_rows(receiver, sender)
        step_statistics = 3 * FLOAT_BYTES if policy.resync is not None else 0
        band = math.prod(shapes.prediction[:-2]) * self.bands.size(sender) * shapes.prediction[-1]
        sent = {
            "kv": sum(
                self._tokens(layer, sender, receiver) * self._token_bytes(layer)
                for number, layer in enumerate(shapes.attentions)
                if self._is_due(number, evaluation)
            ),
            "halo": rows,
            "correction": sum(self._correction(layer, sender) for layer in shapes.attentions),
            "moments": 0 if policy.moments == "separate" else self._moments(),
            "prediction": self.itemsize * band + step_statistics,
        }
        return Counter(sent)

    def _correction(self, layer: Attended, sender: int) -> int:
        """Bytes of what a place says of its keys and values."""
        context = self.policy.context
        if not isinstance(context, StaleKV) or context.correction == "none":
            return 0
        matrices = self._sends_matrices(layer, math.prod(self._grid(layer, sender)))
        numbers = layer.width * ((layer.width if matrices else 1) + 1) + 1
        return 2 * layer.batch * layer.heads * numbers * self.itemsize

    def _sends_matrices(self, layer: Attended, tokens: int) -> bool:
        context = self.policy.context
        return isinstance(context, StaleKV) and context.correction == "linear" and tokens >= 4 * (layer.width + 1)

    def _is_due(self, layer: int, evaluation: int) -> bool:
        """Whether the keys of a layer leave in this evaluation: with partials, for a refresh in the next."""
        context = self.policy.context
        return not isinstance(context, CachedPartials) or (evaluation + 1 + layer) % context.refresh == 0

    def _moments(self) -> int:
        return FLOAT_BYTES * sum(1 + 2 * batch * groups for batch, groups in self.shapes.norms)

    def _read_rows(self, receiver: int, sender: int) -> int:
        """Bytes of the sender's rows that the receiver's convolutions read."""
        if abs(receiver - sender) != 1:
            return 0
        convolutions = self.shapes.convolutions
        return self.itemsize * sum(c.row * (c.before if sender < receiver else c.after) for c in convolutions)

    def _both_rows(self) -> int:
        """Bytes of the first and the last rows of a band, as many as either neighbour may read."""
        return self.itemsize * sum(2 * c.row * max(c.before, c.after) for c in self.shapes.convolutions)

    def _token_bytes(self, layer: Attended) -> int:
        """Bytes of the key and the value of one token of every sample, as they are sent."""
        context = self.policy.context
        bits = context.bits if isinstance(context, StaleKV) else 16
        head = self.itemsize * layer.width if bits == 16 else math.ceil(layer.width * bits / 8) + SCALE_BYTES
        return 2 * layer.batch * layer.heads * head

    def _tokens(self, layer: Attended, sender: int, receiver: int) -> int:
        """Tokens of the sender that the receiver is sent."""
        rows, across = self._grid(layer, sender)
        selection, nearby = self._selection, abs(sender - receiver) == 1
        if isinstance(selection, NearRows):
            return self._near(rows) * across if nearby else 0
        if isinstance(selection, NearRowsAndPooled):
            near = self._near(rows) if nearby else 0
            return near * across + math.ceil((rows - near) / selection.pool) * math.ceil(across / selection.pool)
        return rows * across

    def _grid(self, layer: Attended, group_rank: int) -> tuple[int, int]:
        """Rows and columns of a place's tokens: the latent's, halved some times, rounding up."""
        rows, columns = self.shapes.prediction[-2:]
        stride = 1
        while math.ceil(rows / stride) * math.ceil(columns / stride) != layer.tokens:
            stride *= 2
        first, last = (math.ceil(self.bands.starts[i] / stride) for i in (group_rank, group_rank + 1))
        return last - first, math.ceil(columns / stride)

    def _kept_tokens(self, layer: Attended, group_rank: int) -> int:
        """Bytes that attention keeps at one layer."""
        own, heads = math.prod(self._grid(layer, group_rank)), layer.batch * layer.heads
        drift = FLOAT_BYTES * heads * layer.width * math.ceil(own / DRIFT_STRIDE) if self.policy.resync else 0
        if isinstance(self.policy.context, CachedPartials):
            return heads * own * (layer.width * self.itemsize + FLOAT_BYTES) + drift
        arrived, attended = self._arrived(layer, group_rank), self._attended(layer, group_rank)
        bias = self.itemsize * attended if self._stand_for_several(layer, group_rank) else 0
        tokens = arrived * self._kept_apart() if self._is_derived else attended
        copies = self._copied_tokens(layer, group_rank)
        remembered = self._own_steps() * (self.itemsize * self._sampled(layer, group_rank) + FLOAT_BYTES)
        return 2 * heads * layer.width * (self.itemsize * (tokens + copies) + remembered) + bias + drift

    def _sampled(self, layer: Attended, group_rank: int) -> int:
        """How many of our tokens a fit is made of."""
        own = math.prod(self._grid(layer, group_rank))
        apart = 1 if own < 512 or self._sends_matrices(layer, own) else own // 256
        return math.ceil(own / (apart + 1 if apart % 2 == 0 else apart))

    def _own_steps(self) -> int:
        """Of how many steps our own tokens are kept, to tell how they have changed."""
        context = self.policy.context
        if not isinstance(context, StaleKV) or context.correction == "none":
            return 0
        return 2 if context.extrapolated else 1

    def _kept_apart(self) -> int:
        """How often what came is kept beside what is attended to, and beside what comes.

        Where that is extrapolated from the last two steps, and where differences are added up to what it is made of.
        """
        context = self.policy.context
        return isinstance(context, StaleKV) and context.extrapolated + (context.bits < 16)

    def _copied_tokens(self, layer: Attended, group_rank: int) -> int:
        """Tokens of ours that others hold and differences are taken to, once for all that get the same."""
        context = self.policy.context
        if not isinstance(context, StaleKV) or context.bits == 16:
            return 0
        others = self._others(group_rank)
        return sum({self._which(layer, group_rank, to): self._tokens(layer, group_rank, to) for to in others}.values())

    def _which(self, layer: Attended, group_rank: int, receiver: int) -> str:
        """Which rows of a place reach a receiver as they are."""
        selection = self._selection
        if not isinstance(selection, (NearRows, NearRowsAndPooled)):
            return "all"
        if abs(group_rank - receiver) != 1:
            return "none"
        if self._near(self._grid(layer, group_rank)[0]) == self._grid(layer, group_rank)[0]:
            return "all"
        return "last" if group_rank < receiver else "first"

    def _stand_for_several(self, layer: Attended, group_rank: int) -> bool:
        """Whether any token that the place attends to is an average of several."""
        if not isinstance(self._selection, NearRowsAndPooled) or self._selection.pool == 1:
            return False
        for other in self._others(group_rank):
            rows, across = self._grid(layer, other)
            averaged = rows - self._near(rows) if abs(other - group_rank) == 1 else rows
            if averaged and max(averaged, across) > 1:
                return True
        return False

    @property
    def _selection(self) -> KVSelection | None:
        context = self.policy.context
        return context.selection if isinstance(context, StaleKV) else None

    def _near(self, rows: int) -> int:
        """How many of a neighbour's rows are near."""
        selection = self._selection
        part = selection.fraction if isinstance(selection, NearRows) else getattr(selection, "band", 1.0)
        return min(rows, max(1, round(part * rows)))


def cycle_of(policy: ExchangePolicy) -> int:
    """After how many steps the bytes repeat."""
    return policy.context.refresh if isinstance(policy.context, CachedPartials) else 1


def _sum(counted: Iterable[Counter[str]]) -> Counter[str]:
    total = Counter(dict.fromkeys(KINDS, 0))
    for each in counted:
        total.update(each)
    return total
