"""Images larger than the model was trained for: interlaced patches first, windows after."""

from __future__ import annotations

from benchmarks.diagrams.canvas import MARGIN, Rect, arrow, box, page, rank_style, text
from patchpar.strategies.structure.sizing import scale_of, starts_of

SIDE, NATIVE = 12, 6


def structure() -> str:
    """The two stages of structure guidance at twice the native side."""
    scale, cell, top = scale_of(SIDE, NATIVE), 19, 112
    parts = [
        text(MARGIN, 36, "Twice the size the model was trained for", size=17),
        text(MARGIN, 58, "The denoiser never sees more than an image of native size.", look="soft"),
        text(MARGIN, 92, "above the switch: interlaced patches", size=14),
    ]
    for row in range(SIDE):
        for column in range(SIDE):
            patch = row % scale * scale + column % scale
            at = Rect(MARGIN + column * cell, top + row * cell, cell - 1, cell - 1)
            parts.append(box(at, rank_style(patch), faint=patch > 0))
    middle = MARGIN + SIDE * cell + 30
    for patch in range(scale * scale):
        y = top + patch * 58
        parts.append(box(Rect(middle, y, 46, 46), rank_style(patch), faint=patch > 0))
        parts.append(text(middle + 56, y + 20, "the anchor leads:" if patch == 0 else "drawn to it", size=12))
    parts.append(text(middle + 56, top + 38, "the whole, small", look="soft", size=12))
    return page(
        (820, top + SIDE * cell + 62),
        "Structure guidance: interlaced patches, then windows",
        parts + _windows(560, top, cell),
    )


def _windows(left: float, top: float, cell: float) -> list[str]:
    starts = starts_of(SIDE, NATIVE, 0.5, 1)
    parts = [
        text(left, 92, "below it: overlapping windows", size=14),
        box(Rect(left, top, SIDE * cell, SIDE * cell), "none"),
        arrow(left - 60, top + SIDE * cell / 2, left - 14, top + SIDE * cell / 2),
    ]
    for row, y in enumerate(starts):
        for column, x in enumerate(starts):
            inset = 3 * (row + column)
            at = Rect(
                left + x * cell + inset, top + y * cell + inset, NATIVE * cell - 2 * inset, NATIVE * cell - 2 * inset
            )
            parts.append(box(at, rank_style(row * len(starts) + column), faint=True))
    parts.append(
        text(left, top + SIDE * cell + 24, f"{len(starts) ** 2} windows, blended; they move a", look="soft", size=12)
    )
    parts.append(text(left, top + SIDE * cell + 41, "little in every step", look="soft", size=12))
    return parts
