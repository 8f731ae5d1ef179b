"""An image in bands: what a band is, what crosses its edges, how a VAE decodes it, and the image of the README."""

from __future__ import annotations

from benchmarks.diagrams.canvas import MARGIN, Rect, arrow, box, line, page, rank_style, text
from patchpar.plan.bands import Stencil, split_bands

ROWS, RANKS, STRIDE = 40, 3, 8
SCENE = (
    '<g transform="translate({x:g} {y:g})"><clipPath id="band{number}"><rect width="300" height="{h:g}"/></clipPath>'
    '<g clip-path="url(#band{number})"><g transform="translate(0 {up:g})">'
    '<rect width="300" height="300" fill="#f6c48f"/><rect width="300" height="90" fill="#7fb2dd"/>'
    '<rect y="70" width="300" height="60" fill="#c4c3c8"/>'
    '<circle cx="222" cy="104" r="30" fill="#fff0b8"/><path d="M0 190L52 128L104 178L168 108L300 196V300H0z" '
    'fill="#7a93a8"/><path d="M0 206Q80 168 160 202T300 190V300H0z" fill="#6ba35b"/>'
    '<path d="M0 254Q120 214 300 250V300H0z" fill="#4f8a49"/><rect x="58" y="172" width="78" height="62" '
    'fill="#c0412d"/><path d="M48 174L97 132L146 174z" fill="#7c2a20"/><rect x="88" y="200" width="20" height="34" '
    'fill="#5b2018"/><rect x="68" y="184" width="16" height="16" fill="#ffe9a8"/><rect x="112" y="184" width="16" '
    'height="16" fill="#ffe9a8"/><path d="M214 244V226H196L212 204H202L220 178L238 204H228L244 226H226V244z" '
    'fill="#23512f"/></g></g></g>'
)


def halos() -> str:
    """Uneven bands, and what three kinds of layers need of the others."""
    bands, reach = split_bands(ROWS, RANKS, STRIDE), Stencil(extent=3, stride=1, padding=1)
    left, top, width, row, arrows = 150, 92, 190, 8, []
    parts = [
        text(MARGIN, 36, f"{ROWS} latent rows on {RANKS} ranks", size=17),
        text(MARGIN, 58, f"A band starts at a multiple of the UNet's total stride, here {STRIDE}.", look="soft"),
    ]
    for number in range(len(bands)):
        start, stop = bands.starts[number], bands.starts[number + 1]
        y, height = top + start * row + number * 16, (stop - start) * row
        parts += [
            box(Rect(left, y, width, height), rank_style(number)),
            text(MARGIN, y + height / 2, f"rank {number}"),
            text(MARGIN, y + height / 2 + 17, f"rows {start}-{stop - 1}", look="soft", size=12),
        ]
        if number:
            parts.append(box(Rect(left, y, width, reach.before * row), "edge"))
        if number < len(bands) - 1:
            parts.append(box(Rect(left, y + height - reach.after * row, width, reach.after * row), "edge"))
            between = y + height + 8
            arrows += [
                arrow(left + 60, between - 15, left + 60, between + 15),
                arrow(left + width - 60, between + 15, left + width - 60, between - 15),
            ]
    parts += [*arrows, *_needs(left + width + 50, top)]
    return page((820, top + ROWS * row + 16 * RANKS + 12), "Bands of a latent and the halo between them", parts)


def _needs(x: float, y: float) -> list[str]:
    kinds = (
        (
            "convolution, 3 x 3",
            "the row next to its edge, of each neighbour",
            "the halo (hatched); on its way while the rest is convolved",
        ),
        ("group norm", "count, mean and M2 of all bands", "merged in fp32; in one message with the raw edge rows"),
        ("self-attention", "keys and values of all bands", "on their way while own keys are attended to"),
        ("everything else", "nothing", "one pixel, or the text, at a time"),
    )
    parts = []
    for number, (layer, need, how) in enumerate(kinds):
        top = y + number * 90
        parts += [
            text(x, top + 14, layer, size=15),
            text(x, top + 36, f"needs {need}"),
            text(x, top + 55, how, look="soft", size=12),
            line(x, top + 70, x + 388, top + 70) if number < len(kinds) - 1 else "",
        ]
    return parts


def vae() -> str:
    """The decoder in bands, and who gets the image."""
    ranks, top = 4, 92
    columns = ((60, 1.0), (92, 1.25), (124, 1.5), (150, 1.75))
    parts = [
        text(MARGIN, 36, "A VAE decodes in bands", size=17),
        text(MARGIN, 58, "Its own code runs on each band; a few functions of torch ask the neighbours.", look="soft"),
    ]
    step = 66
    for number in range(ranks):
        x, middle = 110.0, top + number * (step + 8) + step / 2
        parts.append(text(MARGIN, middle + 5, f"rank {number}"))
        for width, grown in columns:
            height = 34 * grown
            parts.append(box(Rect(x, middle - height / 2, width, height), rank_style(number)))
            if number:
                parts.append(
                    arrow(
                        x + width / 2,
                        middle - step - 12 + height / 2,
                        x + width / 2,
                        middle - height / 2 + 4,
                        both=True,
                    )
                )
            x += width + 14
        parts.append(arrow(x + 2, middle, x + 52, top + 2 * (step + 8) - 4))
    right = 110.0 + sum(width + 14 for width, _ in columns) + 60
    parts.append(box(Rect(right, top + 40, 140, 4 * (step + 8) - 88), rank_style(0), "the image,\non rank 0"))
    under = top + ranks * (step + 8) + 16
    parts.append(text(MARGIN, under, "A rank of n holds an nth of the activations, and keys and values of the middle."))
    return page((820, under + MARGIN), "A VAE's decoder in four bands", parts)


def icon() -> str:
    """Four bands with their edges: the mark of the site."""
    parts = [box(Rect(4, 4 + 15 * number, 56, 11), rank_style(number)) for number in range(4)]
    return page((64, 64), "patchpar", parts)


def overview() -> str:
    """One image over four ranks: the image of the README."""
    ranks, left, top, side, gap = 4, 110, 64, 300, 16
    height = side / ranks
    parts = [text(MARGIN, 38, "One image on four devices", size=18)]
    for number in range(ranks):
        y = top + number * (height + gap)
        parts += [
            SCENE.format(number=number, x=left, y=y, h=height, up=-number * height),
            box(Rect(MARGIN, y + 22, 70, 30), rank_style(number), f"rank {number}"),
        ]
        parts += [box(Rect(left, edge, side, 8), "edge") for edge in _edges(number, ranks, y, height)]
        if number:
            parts += [
                arrow(left + 90, y - gap - 8, left + 90, y + 8),
                arrow(left + side - 90, y + 8, left + side - 90, y - gap - 8),
            ]
    bottom = top + ranks * height + (ranks - 1) * gap
    x = left + side + 26
    parts += [
        line(x, top, x, bottom),
        *(
            line(x - 10, top + n * (height + gap) + height / 2, x, top + n * (height + gap) + height / 2)
            for n in range(ranks)
        ),
        *_travels(x + 24, top),
    ]
    return page((900, int(bottom) + MARGIN), "One image over four ranks: bands, halos, and what travels", parts)


def _edges(number: int, ranks: int, y: float, height: float) -> list[float]:
    return [y] * (number > 0) + [y + height - 8] * (number < ranks - 1)


def _travels(x: float, y: float) -> list[str]:
    kinds = (
        (
            "Each device draws a band",
            "with all the layers of the model; diffusers' own code runs",
            "untouched around it.",
        ),
        (
            "Neighbours: edge rows",
            "for convolutions, hatched. With the next line 2 % of the",
            "bytes. They are on their way while the rest is convolved.",
        ),
        (
            "All: three numbers a group",
            "count, mean and spread, for group norms: each band is",
            "normalised as part of the whole image.",
        ),
        (
            "All: keys and values",
            "for self-attention, the other 98 %. This step's, so that the",
            "image is the same; or, if you ask for it, the last step's.",
        ),
    )
    parts = []
    for number, (head, *lines) in enumerate(kinds):
        top = y + number * 91
        parts += [text(x, top + 16, head, size=15)]
        parts += [text(x, top + 38 + 18 * row, words, look="soft") for row, words in enumerate(lines)]
    return parts
