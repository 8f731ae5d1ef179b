"""How queries meet everybody's keys: whose keys each rank attends to in each round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.diagrams.canvas import MARGIN, Rect, box, page, rank_style, text

RANKS = 4
Rounds = Sequence[Callable[[int], tuple[int, ...]]]
"""For every round: whose tokens meet on a rank."""


def _after(*away: int) -> Callable[[int], tuple[int, ...]]:
    return lambda rank: tuple((rank - steps) % RANKS for steps in away)


WAYS: tuple[tuple[str, str, Rounds], ...] = (
    ("gather", "all keys come at once", (_after(0), _after(1, 2, 3))),
    ("ring", "keys move on by one rank", tuple(_after(round_) for round_ in range(RANKS))),
    ("two-way-ring", "keys move both ways", (_after(0), _after(1, -1), _after(2))),
    ("token-ring", "queries move on, results go home", tuple(_after(round_) for round_ in range(RANKS))),
)


def rings() -> str:
    """The rounds of each way on four ranks."""
    parts = [
        text(MARGIN, 36, "Own queries meet everybody's keys", size=17),
        text(
            MARGIN,
            58,
            "Colour: whose keys a rank attends to in a round (token-ring: whose queries are here).",
            look="soft",
        ),
    ]
    for number, way in enumerate(WAYS):
        parts += _panel(MARGIN + number * 196, *way)
    parts.append(
        text(
            MARGIN,
            372,
            "Each round's messages travel while the round before is computed. Parts are merged by their log-sum-exp.",
        )
    )
    return page((820, 396), "Rounds of gather, ring, two-way ring and TokenRing", parts)


def _panel(left: float, name: str, how: str, rounds: Rounds) -> list[str]:
    top, width, height = 138, 38, 42
    parts = [text(left, 92, name, size=15), text(left, 111, how, look="soft", size=11.5)]
    parts += [
        text(left + rank * (width + 4) + width / 2, top - 6, str(rank), look="soft", anchor="middle", size=12)
        for rank in range(RANKS)
    ]
    for number, whose in enumerate(rounds):
        y = top + number * (height + 8)
        for rank in range(RANKS):
            owners = whose(rank)
            part = height / len(owners)
            for row, owner in enumerate(owners):
                at = Rect(left + rank * (width + 4), y + row * part, width, part - (1 if len(owners) > 1 else 0))
                parts.append(box(at, rank_style(owner), str(owner), 11))
    return parts
