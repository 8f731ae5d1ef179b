"""Who does what: the mesh of a plan, guidance on two ranks, stages of a stream."""

from __future__ import annotations

from benchmarks.diagrams.canvas import MARGIN, Rect, arrow, box, page, rank_style, text
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.stream_plan import StreamPlan


def mesh() -> str:
    """Eight ranks of cfg=2, patch=4."""
    plan = Plan(cfg=2, patch=4)
    parts, left, top, width, height = [], 150, 92, 118, 74
    parts += [
        text(MARGIN, 36, "Plan(cfg=2, patch=4): eight ranks", size=17),
        text(MARGIN, 58, "Ranks that talk most have neighbouring numbers.", look="soft"),
    ]
    for rank in range(plan.world_size):
        axes = Mesh(rank, range(plan.world_size), **plan.degrees())
        column, row = axes["patch"].rank, axes["cfg"].rank
        x, y = left + column * (width + 46), top + row * (height + 62)
        parts.append(box(Rect(x, y, width, height), rank_style(column), f"rank {rank}\nband {column}", 15))
        if axes["patch"].after is not None:
            parts.append(arrow(x + width + 4, y + height / 2, x + width + 42, y + height / 2, both=True))
        if row == 0:
            parts.append(arrow(x + width / 2, y + height + 4, x + width / 2, y + height + 58, both=True))
    for row, words in enumerate(("with the prompt", "without it")):
        middle = top + row * (height + 62) + height / 2
        parts += [text(MARGIN, middle - 3, f"cfg {row}"), text(MARGIN, middle + 15, words, look="soft", size=12)]
    under = top + 2 * height + 62 + 34
    parts += [
        text(
            MARGIN,
            under,
            "axis patch: edge rows to neighbours; moments, keys and values to all of a row, in every layer",
        ),
        text(MARGIN, under + 22, "axis cfg: one prediction, once in a step"),
    ]
    return page((820, under + 44), "A mesh of two guidance branches and four bands", parts)


def guidance() -> str:
    """One step of guidance by one rank and by two."""
    top, unit, height = 92, 150, 44
    parts = [
        text(MARGIN, 36, "One step with guidance", size=17),
        text(MARGIN, 58, "The denoiser runs with the prompt and without; its two predictions make one.", look="soft"),
        text(MARGIN, top + 27, "one process"),
    ]
    left = 150
    for number, words in enumerate(("with the prompt", "without it")):
        parts.append(box(Rect(left + number * (unit + 6), top, unit, height), rank_style(number), words))
    parts.append(box(Rect(left + 2 * unit + 12, top, 92, height), "box", "scheduler"))
    lower = top + 92
    for number, words in enumerate(("with the prompt", "without it")):
        y = lower + number * (height + 36)
        parts += [
            text(MARGIN, y + 27, f"cfg=2, rank {number}"),
            box(Rect(left, y, unit, height), rank_style(number), words),
        ]
        parts.append(box(Rect(left + unit + 80, y, 92, height), "box", "scheduler"))
    start, end = left + unit + 4, left + unit + 76
    upper_y, lower_y = lower + height / 2, lower + height + 36 + height / 2
    parts += [
        arrow(start, upper_y, end, lower_y - 8),
        arrow(start, lower_y, end, upper_y + 8),
        text(left + unit + 190, lower + height + 22, "one message each way, as large as the latent", look="soft"),
    ]
    return page((820, lower + 2 * height + 36 + MARGIN), "Guidance on one rank, and split between two", parts)


def stages() -> str:
    """Blocks of a stream on the ranks of StreamPlan.even(4, 5)."""
    plan = StreamPlan.even(4, 5)
    blocks, left, top, width, height = 8, 190, 100, 48, 38
    parts = [
        text(MARGIN, 36, f"{plan.steps} denoising steps on {plan.ranks} ranks", size=17),
        text(
            MARGIN,
            58,
            "Each rank keeps one step and its weights; blocks of frames pass from rank to rank.",
            look="soft",
        ),
        text(left, top - 12, "time", look="soft"),
        arrow(left + 34, top - 16, left + 130, top - 16, "old"),
    ]
    for number, stage in enumerate(plan.stages):
        y = top + number * (height + 8)
        what = "decodes" if not len(stage.steps) else f"step {stage.steps[0]}"
        parts.append(text(MARGIN, y + 25, f"rank {stage.ranks[0]}: {what}"))
        for block in range(blocks):
            at = Rect(left + (number + block) * (width + 2), y, width, height)
            if number + block < blocks + 2:
                parts.append(box(at, rank_style(block), f"b{block}"))
    under = top + plan.depth * (height + 8) + 22
    parts.append(
        text(MARGIN, under, "The first block is out after every rank has had it; from then on one comes in each beat.")
    )
    return page((820, under + MARGIN), "A stream: blocks pass from one denoising step to the next", parts)
