"""Bytes that a rank sends in each layer of a transformer whose tokens are split: by closed formula, and counted.

Counted where everything leaves a rank, with a toy model on ranks that are threads. Where ranks divide the tokens and
the heads evenly the two are equal to the byte.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from benchmarks.tokens.model import Subject, subject
from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.strategies import parse_strategy

RANKS = (2, 3, 4)
LATENTS = 24  # 144 tokens: even shares for 2, 3 and 4 ranks
ITEMSIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What one rank of `n` sends per layer, in units of S * hidden; `log_sums`: in units of S * heads, beside it."""

    strategy: str
    text: str
    fraction: Callable[[int], Fraction]
    log_sums: Callable[[int], Fraction] = lambda n: Fraction(0)
    ranks: tuple[int, ...] = RANKS

    def num_bytes(self, n: int, tokens: int, heads: int, hidden: int) -> Fraction:
        """Of fp32 values, for a batch of one."""
        return ITEMSIZE * tokens * (self.fraction(n) * hidden + self.log_sums(n) * heads)


def _ring(n: int) -> Fraction:
    return Fraction(2 * (n - 1), n)


def _usp(n: int, ulysses: int) -> Fraction:
    return (Fraction(4 * (ulysses - 1), ulysses) + 2 * (n // ulysses - 1)) / n


FORMULAS = (
    Formula(strategy="exact", text="2(N-1)/N", fraction=_ring),
    Formula(strategy="exact:attention=ring", text="2(N-1)/N", fraction=_ring),
    Formula(strategy="exact:attention=two-way-ring", text="2(N-1)/N", fraction=_ring),
    Formula(
        strategy="exact:attention=token-ring",
        text="2(N-1)/N, and (N-1)/N of S heads",
        fraction=_ring,
        log_sums=lambda n: Fraction(n - 1, n),
    ),
    *(
        Formula(
            strategy=f"exact:ulysses={n}",
            text="4(N-1)/N²",
            fraction=lambda n: Fraction(4 * (n - 1), n**2),
            ranks=(n,),
        )
        for n in RANKS
    ),
    *(
        Formula(
            strategy=f"exact:attention={way}:ulysses=2",
            text="(4(U-1)/U + 2(R-1))/N",
            fraction=lambda n: _usp(n, 2),
            ranks=(4,),
        )
        for way in ("gather", "ring", "two-way-ring")
    ),
)


def volumes() -> Iterator[tuple[str, bool]]:
    """Rows of the table, and whether count and formula are equal."""
    toy = subject("pixart", toy=True).of_size(LATENTS)
    heads = toy.model.config.num_attention_heads
    hidden = heads * toy.model.config.attention_head_dim
    for formula in FORMULAS:
        for n in formula.ranks:
            expected = formula.num_bytes(n, toy.tokens, heads, hidden)
            counted = counted_per_layer(toy, formula.strategy, n)
            equal = all(each == expected for each in counted)
            own = " ".join(f"{int(each):,}" if each.denominator == 1 else str(each) for each in sorted(set(counted)))
            cells = (n, formula.strategy, formula.text, f"{int(expected):,}", own, "yes" if equal else "**no**")
            yield f"| {' | '.join(map(str, cells))} |", equal


def counted_per_layer(whole: Subject, strategy: str, ranks: int) -> list[Fraction]:
    """Bytes that each of so many ranks sends in a layer, that is without the prediction. Raises what a rank raises."""
    from tests.unit.threads import on_threads

    keys = parse_strategy(strategy).policy.keys
    layers = sum(len(block.paths) for block in whole.plan.blocks)

    @torch.no_grad()
    def sent(transport: Any) -> Fraction:
        comm, axis, model = (
            Communicator(transport),
            Axis("patch", transport.rank, ranks, tuple(range(ranks))),
            whole.twin(),
        )
        shard = TransformerSharder(model, whole.plan, TokenSplit(comm, axis, partial(attend_together, keys)))
        shard.denoise(model.forward, **whole.call)
        return Fraction(comm.traffic.total_bytes - comm.traffic.bytes_sent["tokens"], layers)

    found = on_threads(ranks, sent, deadline=60.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found
