"""Where weights are: blocks in slots, and blocks on stages that compute pieces."""

from __future__ import annotations

from benchmarks.diagrams.canvas import MARGIN, Rect, arrow, box, page, rank_style, text

RANKS, SLOTS, BLOCKS = 3, 2, 6
STAGES, PIECES, STEPS = 3, 4, 2


def slots() -> str:
    """A block in parts on three ranks, and which block is in which slot while blocks run."""
    left, width, height, top = 150, 104, 40, 92
    parts = [
        text(MARGIN, 36, "weights=sharded on three ranks", size=17),
        text(MARGIN, 58, "Each keeps a third of the bytes of every block. A block is whole in a slot.", look="soft"),
        text(MARGIN, top + 25, "bytes of a block"),
    ]
    for rank in range(RANKS):
        at = Rect(left + rank * 2 * width, top, 2 * width, height)
        parts.append(box(at, rank_style(rank), f"kept by rank {rank}"))
    runs = top + height + 50
    parts += [text(MARGIN, runs + 25, "runs"), text(left, runs - 12, "time", look="soft")]
    parts.append(arrow(left + 34, runs - 16, left + 130, runs - 16, "old"))
    for number in range(BLOCKS):
        at = Rect(left + number * width, runs, width - 2, height)
        parts.append(box(at, "box", f"block {number}"))
    for slot in range(SLOTS):
        parts += _slot(slot, Rect(left, runs + (slot + 1) * (height + 12), width, height))
    under = runs + (SLOTS + 1) * (height + 12) + 22
    parts += [
        text(MARGIN, under, "While a block runs, the next one comes into the other slot: parts of it from all ranks."),
        text(MARGIN, under + 22, "weights=hosted: from the memory of the host instead, on one device too."),
    ]
    return page((820, under + 46), "Two slots, through which the blocks of a network pass", parts)


def _slot(slot: int, first: Rect) -> list[str]:
    parts = [text(MARGIN, first.y + 25, f"slot {slot}")]
    for number in range(BLOCKS):
        at = Rect(first.x + number * first.w, first.y, first.w - 2, first.h)
        held = number % SLOTS == slot
        if held:
            parts.append(box(at, "box", f"block {number}"))
        elif number + 1 < BLOCKS:
            parts.append(_arriving(at, number + 1))
    return parts


def _arriving(at: Rect, block: int) -> str:
    third = at.w / RANKS
    stripes = [box(Rect(at.x + rank * third, at.y, third, at.h), rank_style(rank), faint=True) for rank in range(RANKS)]
    return "".join(stripes) + box(at, "none", f"block {block} comes", 12)


def piped() -> str:
    """Pieces of the tokens on three stages, in two steps."""
    left, top, width, height = 170, 100, 58, 40
    parts = [
        text(MARGIN, 36, f"stage={STAGES}, strategy=piped: {PIECES} pieces", size=17),
        text(MARGIN, 58, "Each stage has a third of the blocks; pieces of the tokens pass through them.", look="soft"),
        text(left, top - 12, "time", look="soft"),
        arrow(left + 34, top - 16, left + 130, top - 16, "old"),
    ]
    for stage in range(STAGES):
        y = top + stage * (height + 16)
        parts.append(text(MARGIN, y + 25, f"stage {stage}"))
        for number in range(STEPS * PIECES):
            step, piece = divmod(number, PIECES)
            at = Rect(left + (stage + number) * (width + 2), y, width, height)
            parts.append(box(at, rank_style(piece), f"piece {piece}\nstep {step}", 11, faint=step == 0))
            if stage + 1 < STAGES and number == 1:
                parts.append(arrow(at.x + width / 2, y + height + 2, at.x + width + 6, y + height + 14))
    under = top + STAGES * (height + 16) + 14
    parts += [
        text(
            MARGIN,
            under,
            "A stage remembers the keys and values of its own blocks. Those of pieces after this one are of the step",
        ),
        text(MARGIN, under + 18, "before, extrapolated and corrected; they are never sent."),
        text(MARGIN, under + 40, "Sent between stages: the hidden states of one piece at a time.", look="soft"),
    ]
    return page((820, under + 62), "Pieces of an image that pass through the stages of a denoiser", parts)
