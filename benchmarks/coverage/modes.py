"""What is tried with each denoiser on a number of ranks: every exact mode, every stale strategy, and the controls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from patchpar.plan.attention_mode import ALGORITHMS

EXCHANGE = Literal["on", "off"]
FIRST, SECOND, MOVED = "first", "second", "moved"
"""Inputs of an evaluation: of the first size, of the second, and of the first with other numbers in the latent."""
KEEPS_ALL = ("displaced", "fresh-edges")
"""Stale strategies that attend to all old keys; pcpp drops most of each neighbour's, and all of those beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A strategy, the evaluations of one image, and which of them must be exact. `name` is what reports call it.

    Of the evaluations in `stale` it must be seen that they are not. `exchange` off: none may be exact.
    """

    name: str
    strategy: str
    evaluations: tuple[str, ...]
    exact: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()
    exchange: EXCHANGE = "on"


def modes(ranks: int) -> list[Mode]:
    """All of them; where hybrids are possible only those, since everything else is tried on fewer ranks."""
    hybrids = [mode for mode in _exact(ranks) if " x " in mode.name]
    if hybrids:
        return [*hybrids, next(_controls())]
    return [*_exact(ranks), *_stale(ranks), *_controls()]


def _exact(ranks: int) -> Iterator[Mode]:
    for degree in (each for each in range(1, ranks + 1) if ranks % each == 0):
        for way in ALGORITHMS if degree < ranks else ("gather",):
            options = [f"attention={way}"] * (way != "gather") + [f"ulysses={degree}"] * (degree > 1)
            name = way if degree == 1 else f"ulysses={degree}" + f" x {way}" * (degree < ranks)
            strategy = ":".join(["exact", *([",".join(options)] if options else [])])
            yield Mode(name=name, strategy=strategy, evaluations=(FIRST, SECOND), exact=(0, 1))


def _stale(ranks: int) -> Iterator[Mode]:
    """Warmed up to the end; then old keys that are the new ones, since the inputs are the same, and old keys of others.

    Where pcpp keeps all of each neighbour, and there is one only, it drops nothing.
    """
    for name in (*KEEPS_ALL, "pcpp"):
        yield Mode(
            name=f"{name}, warm-up to the end",
            strategy=f"{name}:warmup_steps=2",
            evaluations=(FIRST, MOVED),
            exact=(0, 1),
        )
        exact = (0, 1) if name in KEEPS_ALL else (0,)
        stale = (2,) if name in KEEPS_ALL else (1, 2)
        yield Mode(
            name=name, strategy=f"{name}:warmup_steps=1", evaluations=(FIRST, FIRST, MOVED), exact=exact, stale=stale
        )
    if ranks == 2:
        yield Mode(
            name="pcpp, all of the neighbour",
            strategy="pcpp:warmup_steps=1,fraction=1.0",
            evaluations=(FIRST, FIRST, MOVED),
            exact=(0, 1),
            stale=(2,),
        )


def _controls() -> Iterator[Mode]:
    for strategy in ("exact", *(f"{name}:warmup_steps=1" for name in (*KEEPS_ALL, "pcpp"))):
        yield Mode(
            name=f"{strategy.partition(':')[0]} without exchange",
            strategy=strategy,
            evaluations=(FIRST, FIRST),
            exchange="off",
        )
