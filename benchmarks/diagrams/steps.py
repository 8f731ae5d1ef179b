"""What is of which step: the clock of stale strategies, and what a rank sees of other ranks' keys."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.diagrams.canvas import MARGIN, Rect, arrow, box, page, rank_style, text
from patchpar.plan.kv_selection import AllRows, KVSelection, NearRows, NearRowsAndPooled, TokensAcross
from patchpar.plan.step_clock import StepClock

STEPS, WARM_UP, RANKS = 5, 1, 2
SENT = {"displaced": ("old", "old"), "fresh-edges": ("now", "old")}
"""When edges and moments are of, and keys and values, after the warm-up."""


def staleness() -> str:
    """Two ranks, five steps, under `displaced` and `fresh-edges`."""
    parts = [
        text(MARGIN, 36, "Which step's values a rank uses", size=17),
        text(MARGIN, 58, "Thin: edge rows and moments, 2 % of the bytes. Thick: keys and values.", look="soft"),
    ]
    for number, (name, sent) in enumerate(SENT.items()):
        parts += _timeline(name, sent, 96 + number * 200)
    under = 96 + 2 * 200 + 4
    parts += [
        arrow(MARGIN, under, MARGIN + 46, under),
        text(MARGIN + 56, under + 5, "waited for, of this step"),
        arrow(MARGIN + 250, under, MARGIN + 296, under, "old"),
        text(MARGIN + 306, under + 5, "has a whole step to arrive, used in the next"),
    ]
    return page((820, under + MARGIN), "Fresh and stale values in displaced and fresh-edges", parts)


def _timeline(name: str, sent: tuple[str, str], top: float) -> list[str]:
    left, width, gap, height, between = 150, 92, 36, 40, 58
    parts = [text(MARGIN, top + 14, name, size=15)]
    clock = StepClock()
    for step in range(STEPS):
        x, exact = left + step * (width + gap), clock.step < WARM_UP
        parts.append(
            text(
                x + width / 2,
                top - 2,
                f"step {clock.step}" + (", exact" if exact else ""),
                look="soft",
                anchor="middle",
                size=12,
            )
        )
        for rank in range(RANKS):
            y = top + 10 + rank * (height + between)
            parts.append(box(Rect(x, y, width, height), rank_style(rank), f"rank {rank}"))
        first, second = top + 10 + height + 3, top + 10 + height + between - 3
        for offset, thick, look in _lanes(("now", "now") if exact else sent):
            away = width + gap if look == "old" else 0
            if look == "now" or step < STEPS - 1:
                pair = (
                    arrow(x + offset, first, x + offset + away, second, look),
                    arrow(x + offset + 14, second, x + offset + 14 + away, first, look),
                )
                parts += [
                    each.replace("<line ", '<line stroke-opacity="1" style="stroke-width:3.4" ') if thick else each
                    for each in pair
                ]
        clock.tick()
    return parts


def _lanes(sent: tuple[str, str]) -> Iterator[tuple[float, bool, str]]:
    edges, keys = sent
    yield 14, False, edges
    yield 56, True, keys


def context() -> str:
    """What rank 1 of four sees of the others' tokens when they are a step old."""
    ways: tuple[tuple[str, str, KVSelection], ...] = (
        ("context=all", "displaced, fresh-edges", AllRows()),
        ("pcpp", "the nearest 0.3 of the neighbours", NearRows(0.3)),
        ("context=pooled", "near rows, averages of the rest", NearRowsAndPooled(0.2, 4)),
    )
    parts = [
        text(MARGIN, 36, "What rank 1 of four attends to", size=17),
        text(MARGIN, 58, "Its own tokens are of this step, the others' one step old.", look="soft"),
    ]
    for number, way in enumerate(ways):
        parts += _panel(104 + number * 250, *way)
    return page((820, 504), "What a rank sees of the others' keys and values", parts)


def _panel(left: float, name: str, how: str, selection: KVSelection) -> list[str]:
    rows, across, cell, top, me = 8, TokensAcross(16), 10, 122, 1
    parts, seen = [text(left, 84, name, size=14), text(left, 104, how, look="soft", size=12)], 0
    for sender in range(4):
        y = top + sender * (rows * cell + 6)
        if left < 200:
            parts.append(text(MARGIN, y + rows * cell / 2 + 5, f"rank {sender}"))
        parts.append(box(Rect(left, y, across.columns * cell, rows * cell), "none"))
        if sender == me:
            parts.append(box(Rect(left, y, across.columns * cell, rows * cell), rank_style(me), "own"))
            continue
        for piece in selection.pieces(sender, me, rows):
            seen += piece.num_tokens(across)
            for start in range(piece.start, piece.stop, piece.pool):
                height = min(piece.pool, piece.stop - start) * cell
                for column in range(0, across.columns, piece.pool):
                    at = Rect(left + column * cell + 1, y + start * cell + 1, piece.pool * cell - 2, height - 2)
                    parts.append(box(at, rank_style(sender), faint=piece.pool > 1))
    part = seen / (3 * rows * across.num_tokens)
    parts.append(text(left, top + 4 * (rows * cell + 6) + 14, f"{part:.0%} of the others' keys"))
    return parts
