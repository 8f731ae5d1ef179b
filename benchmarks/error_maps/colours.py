"""Errors of pixels as colours, on one logarithmic scale, so that maps of different strategies can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

LEAST, MOST = 1e-4, 1.0  # errors that are black and white; half a step of 8 bits is 2e-3
ANCHORS = ((0, 0, 0), (70, 20, 110), (190, 50, 85), (245, 150, 40), (255, 255, 255))
"""Colours at equal distances on the logarithmic scale: each is brighter than the one before."""
PALETTE = 64  # colours of a file


def errors_of(one: Any, other: Any) -> Any:
    """The largest |a - b| over the channels of each pixel: images (H, W, C) in 0..1 to (H, W)."""
    return np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max(axis=-1)


def coloured(errors: Any) -> Any:
    """Errors of any shape to colours, with a last axis of 3, uint8."""
    decades = np.log10(np.clip(errors, LEAST, MOST) / LEAST) / np.log10(MOST / LEAST)
    position = decades * (len(ANCHORS) - 1)
    channels = [np.interp(position, range(len(ANCHORS)), values) for values in zip(*ANCHORS, strict=True)]
    return np.round(np.stack(channels, axis=-1)).astype(np.uint8)


def error_map(errors: Any) -> Image.Image:
    """Errors (H, W) as an image with a palette, so that its file is small."""
    return Image.fromarray(coloured(errors)).quantize(PALETTE, method=Image.Quantize.MEDIANCUT)


def scale_svg() -> str:
    """The scale as SVG: a bar of the colours and the errors below it."""
    exponents = [round(np.log10(LEAST) + number) for number in range(len(ANCHORS))]
    stops = "".join(
        f'<stop offset="{number / (len(ANCHORS) - 1):.2f}" stop-color="rgb{colour}"/>'
        for number, colour in enumerate(ANCHORS)
    )
    labels = "".join(
        f'<text x="{20 + 80 * number}" y="42" text-anchor="middle">1e{exponent}</text>'
        for number, exponent in enumerate(exponents)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 50" width="360" height="50" role="img" '
        'font-family="sans-serif" font-size="12" fill="#777"><title>Scale of the error maps</title>'
        f'<defs><linearGradient id="errors">{stops}</linearGradient></defs>'
        f'<rect x="20" y="6" width="320" height="18" fill="url(#errors)" stroke="#777"/>{labels}</svg>\n'
    )
