"""How each kind of object is drawn: flat shapes in units of the object, standing on a point of the ground."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import ImageDraw

Color = tuple[int, int, int]

PAINT: dict[str, Color] = {
    "red": (215, 50, 45),
    "blue": (50, 90, 215),
    "yellow": (245, 205, 50),
    "white": (245, 245, 245),
    "purple": (150, 70, 185),
    "orange": (245, 135, 40),
}
_FOLIAGE, _BARK, _ROOF, _ENTRANCE = (60, 150, 60), (110, 75, 45), (120, 60, 50), (90, 60, 40)
_LIT, _GLASS, _PLASTER, _BASKET = (255, 235, 140), (190, 220, 240), (240, 238, 230), (140, 95, 50)
_DARK = 0.6
"""Below this light lamps are lit."""

EXTENTS: dict[str, tuple[float, float, float]] = {
    "house": (65, -114, 0),
    "tree": (62, -157, 0),
    "pine": (48, -168, 0),
    "balloon": (48, -238, -86),
    "tower": (29, -202, 0),
}
"""Half width, top and bottom of each kind in object units, from the point it stands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brush:
    """Where and in which light to draw: origin (x, y) in canvas pixels, pixels per object unit, light in 0..1."""

    draw: ImageDraw.ImageDraw
    x: float
    y: float
    unit: float
    light: float

    def lit(self, color: Color) -> Color:
        """The colour in this light."""
        return scaled(color, self.light)

    def polygon(self, points: list[tuple[float, float]], color: Color) -> None:
        """A filled polygon; points in object units, y upwards is negative."""
        self.draw.polygon([(self.x + x * self.unit, self.y + y * self.unit) for x, y in points], fill=color)

    def box(self, left: float, top: float, right: float, bottom: float, color: Color) -> None:
        """A filled rectangle in object units."""
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], color)

    def oval(self, left: float, top: float, right: float, bottom: float, color: Color) -> None:
        """A filled ellipse within that box, in object units."""
        corners = [self.x + left * self.unit, self.y + top * self.unit]
        self.draw.ellipse([*corners, self.x + right * self.unit, self.y + bottom * self.unit], fill=color)


def scaled(color: Color, factor: float) -> Color:
    """The colour times a factor, within 0..255."""
    return tuple(int(max(0, min(255, channel * factor))) for channel in color)  # type: ignore[return-value]


def mixed(one: Color, other: Color, fraction: float) -> Color:
    """One colour with that share of another."""
    return tuple(int(a * (1 - fraction) + b * fraction) for a, b in zip(one, other, strict=True))  # type: ignore[return-value]


def render_object(brush: Brush, kind: str, color: str | None) -> None:
    """Draw one object; colorless kinds take None."""
    _PAINTERS[kind](brush, PAINT[color or "white"])


def _house(brush: Brush, paint: Color) -> None:
    brush.box(-52, -62, 52, 0, brush.lit(paint))
    brush.polygon([(-65, -62), (0, -114), (65, -62)], brush.lit(_ROOF))
    brush.box(-12, -36, 12, 0, brush.lit(_ENTRANCE))
    window = _LIT if brush.light < _DARK else brush.lit(_GLASS)
    for middle in (-32, 32):
        brush.box(middle - 10, -50, middle + 10, -28, window)


def _tree(brush: Brush, _: Color) -> None:
    brush.box(-8, -70, 8, 0, brush.lit(_BARK))
    for x, y, radius in ((0, -115, 42), (-30, -90, 32), (30, -90, 32)):
        brush.oval(x - radius, y - radius, x + radius, y + radius, brush.lit(_FOLIAGE))


def _pine(brush: Brush, _: Color) -> None:
    brush.box(-7, -26, 7, 0, brush.lit(_BARK))
    for tier, (y, half) in enumerate(((-20, 48), (-62, 38), (-102, 27))):
        brush.polygon([(-half, y), (0, y - 66), (half, y)], brush.lit((25, 95 + 12 * tier, 60)))


def _balloon(brush: Brush, paint: Color) -> None:
    rope = max(1, round(2 * brush.unit))
    for side in (-1, 1):
        ends = [(38 * side, -166), (10 * side, -108)]
        points = [(brush.x + x * brush.unit, brush.y + y * brush.unit) for x, y in ends]
        brush.draw.line(points, fill=brush.lit((70, 50, 40)), width=rope)
    brush.oval(-48, -238, 48, -136, brush.lit(paint))
    brush.oval(-20, -238, 20, -136, brush.lit(mixed(paint, (255, 255, 255), 0.4)))
    brush.box(-14, -110, 14, -86, brush.lit(_BASKET))


def _tower(brush: Brush, paint: Color) -> None:
    brush.polygon([(-29, 0), (-20, -150), (20, -150), (29, 0)], brush.lit(_PLASTER))
    for band in (0, 2):
        low, high = (band + 1) / 4, (band + 2) / 4
        wide, narrow = 29 - 9 * low, 29 - 9 * high
        ring = [(-wide, -150 * low), (-narrow, -150 * high), (narrow, -150 * high), (wide, -150 * low)]
        brush.polygon(ring, brush.lit(paint))
    brush.box(-14, -176, 14, -150, _LIT if brush.light < 0.8 else brush.lit(_GLASS))
    brush.polygon([(-19, -176), (0, -202), (19, -176)], scaled(paint, brush.light * 0.9))


_PAINTERS: dict[str, Callable[[Brush, Color], None]] = {
    "house": _house,
    "tree": _tree,
    "pine": _pine,
    "balloon": _balloon,
    "tower": _tower,
}
