"""Sizes by ratio: about as many pixels as the size that a model was trained at, in steps that its plans can divide."""

from itertools import product
from math import lcm, log, sqrt

from patchpar import PlanError

from .defaults import Defaults
from .requests import MIN_SIDE

RATIOS = {"1:1": 1.0, "4:3": 4 / 3, "3:4": 3 / 4, "3:2": 3 / 2, "2:3": 2 / 3, "16:9": 16 / 9, "9:16": 9 / 16}
LARGE = 512  # pixels of the shorter side, from which models are trained at multiples of COARSE
COARSE, FINE = 64, 32  # pixels


def unit_of(known: Defaults) -> int:
    """What sides are multiples of, in pixels."""
    return lcm(known.grid, COARSE if min(known.height, known.width) >= LARGE else FINE)


def size_of_ratio(name: str, known: Defaults, times: int = 1) -> tuple[int, int]:
    """Width and height in pixels with this ratio, `times` as long as at the model's own size. Raises PlanError."""
    if name not in RATIOS:
        raise PlanError(f"ratio {name!r}: choose one of {', '.join(RATIOS)}")
    ratio, area, unit = RATIOS[name], known.height * known.width, unit_of(known)
    ideal = sqrt(area * ratio), sqrt(area / ratio)

    def error(size: tuple[int, int]) -> float:
        """Of ratio, twice, and of area, by factors. What is larger takes longer, and counts three times."""
        width, height = size
        more = log(width * height / area)
        return 2 * abs(log(width / height / ratio)) + max(-more, 3 * more)

    widths, heights = (_multiples_near(side, unit) for side in ideal)
    width, height = min(product(widths, heights), key=error)
    return times * width, times * height


def _multiples_near(side: float, unit: int) -> tuple[int, int]:
    below = max(-(-MIN_SIDE // unit), int(side // unit)) * unit
    return below, below + unit
