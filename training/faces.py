"""A drawn talking face: an identity that stays, and a pose that changes from frame to frame.

Lengths are in parts of 1/96 of the side, so the same face is drawn at every size.
"""

from __future__ import annotations

import colorsys
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

MOODS = ("calm", "happy", "angry")
"""What the prompt can ask for: brows flat, raised with red cheeks, or slanted."""
UNITS = 96
MIDDLE, HEAD_Y = 48.0, 45.0
"""Middle of the face in units where the head is at rest."""
MOUTH_Y, EYES_Y = 17.0, -3.0
"""From the middle of the face."""
EYE_X = 11.0
INTERIOR, LIPS = (58, 14, 20), (176, 62, 68)
"""Colours of an open mouth and of the lips, the same for everyone, so that the opening can be measured."""

Color = tuple[int, int, int]
_SUPERSAMPLE = 2
_SKIN = ((250, 218, 190), (236, 188, 150), (200, 142, 102), (150, 100, 68), (112, 74, 50))
_HAIR = ((38, 32, 32), (98, 62, 38), (226, 192, 104), (178, 72, 36), (160, 160, 166), (240, 240, 236))


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What does not change while someone talks. `width`: of the face, 1 is ordinary."""

    skin: Color
    hair: Color
    shirt: Color
    background: Color
    long_hair: bool
    glasses: bool
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pose:
    """One frame: mouth opening and width, lids from 0 (open) to 1, head from its place at rest in units, mood."""

    opening: float = 0.0
    spread: float = 0.5
    lids: float = 0.0
    dx: float = 0.0
    dy: float = 0.0
    mood: str = "calm"


def sample_identity(rng: random.Random) -> Identity:
    """Someone, by the generator alone."""
    hue, grey = rng.random(), rng.random() < 0.2
    shirt = colorsys.hsv_to_rgb(hue, 0.06 if grey else rng.uniform(0.5, 0.85), rng.uniform(0.3, 0.9))
    behind = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.1, 0.4), rng.uniform(0.65, 0.92))
    return Identity(
        skin=_jittered(rng, rng.choice(_SKIN)),
        hair=_jittered(rng, rng.choice(_HAIR)),
        shirt=_bytes(shirt),
        background=_bytes(behind),
        long_hair=rng.random() < 0.5,
        glasses=rng.random() < 0.25,
        width=rng.uniform(0.92, 1.1),
    )


def render_face(identity: Identity, pose: Pose, *, side: int) -> np.ndarray:
    """Pixels (side, side, 3) uint8."""
    image = Image.new("RGB", (side * _SUPERSAMPLE,) * 2, identity.background)
    brush = _Brush(draw=ImageDraw.Draw(image), unit=side * _SUPERSAMPLE / UNITS, x=MIDDLE + pose.dx, y=HEAD_Y + pose.dy)
    _body(brush, identity)
    _head(brush, identity)
    if pose.mood == "happy":
        for sign in (-1, 1):
            brush.ellipse(sign * 15 * identity.width, 8, 4.5, 3.5, _mixed(identity.skin, (226, 70, 80), 0.55))
    for sign in (-1, 1):
        _eye(brush, identity, pose, sign)
    _mouth(brush, pose)
    return np.asarray(image.reduce(_SUPERSAMPLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Brush:
    """Draws at places from the middle of the face (x, y), all in units."""

    draw: ImageDraw.ImageDraw
    unit: float
    x: float
    y: float

    def ellipse(self, x: float, y: float, across: float, down: float, color: Color) -> None:
        self.draw.ellipse(self._box(x - across, y - down, x + across, y + down), fill=color)

    def block(self, box: tuple[float, float, float, float], radius: float, color: Color) -> None:
        self.draw.rounded_rectangle(self._box(*box), radius * self.unit, fill=color)

    def ring(self, x: float, y: float, radius: float, color: Color) -> None:
        box = self._box(x - radius, y - radius, x + radius, y + radius)
        self.draw.ellipse(box, outline=color, width=max(1, round(1.2 * self.unit)))

    def stroke(self, points: list[tuple[float, float]], width: float, color: Color) -> None:
        ends = [((self.x + x) * self.unit, (self.y + y) * self.unit) for x, y in points]
        self.draw.line(ends, fill=color, width=max(1, round(width * self.unit)))

    def arc(self, box: tuple[float, float, float, float], degrees: tuple[float, float], color: Color) -> None:
        self.draw.pieslice(self._box(*box), *degrees, fill=color)

    def _box(self, left: float, top: float, right: float, bottom: float) -> list[float]:
        x, y, unit = self.x, self.y, self.unit
        return [(x + left) * unit, (y + top) * unit, (x + right) * unit, (y + bottom) * unit]


def _body(brush: _Brush, identity: Identity) -> None:
    wide = 26 * identity.width
    if identity.long_hair:
        brush.block((-wide * 1.22, -24, wide * 1.22, 34), 14, identity.hair)
    still = _Brush(draw=brush.draw, unit=brush.unit, x=MIDDLE, y=0)
    still.block((-38, 80, 38, 130), 14, identity.shirt)
    shade = _mixed(identity.skin, (0, 0, 0), 0.14)
    brush.stroke([(0, 20), (MIDDLE - brush.x, 84 - brush.y)], 15, shade)


def _head(brush: _Brush, identity: Identity) -> None:
    wide = 26 * identity.width
    brush.ellipse(0, -7, wide * 1.1, 30, identity.hair)
    brush.ellipse(0, 0, wide, 31, identity.skin)
    brush.arc((-wide * 1.04, -35, wide * 1.04, 10), (188, 352), identity.hair)
    shade = _mixed(identity.skin, (0, 0, 0), 0.22)
    brush.stroke([(0, 0), (-2.2, 8), (1.5, 8)], 1.3, shade)


def _eye(brush: _Brush, identity: Identity, pose: Pose, sign: int) -> None:
    x, wide_open = sign * EYE_X * identity.width, 1 - pose.lids
    brush.ellipse(x, EYES_Y, 5.2, max(0.6, 3.9 * wide_open), (252, 252, 252))
    if wide_open > 0.4:
        brush.ellipse(x + 0.25 * pose.dx, EYES_Y, 2.4, 2.4, (46, 36, 32))
    inner, outer = {"calm": (-8.5, -8.5), "happy": (-11.0, -10.0), "angry": (-6.0, -11.0)}[pose.mood]
    brush.stroke([(x - sign * 5, inner), (x + sign * 5, outer)], 1.8, _mixed(identity.hair, (0, 0, 0), 0.35))
    if identity.glasses:
        brush.ring(x, EYES_Y, 8, (30, 30, 34))


def _mouth(brush: _Brush, pose: Pose) -> None:
    across, down = 6.5 + 5 * pose.spread, 7.5 * pose.opening
    brush.ellipse(0, MOUTH_Y, across + 1.6, down + 1.7, LIPS)
    if down > 0.4:
        brush.ellipse(0, MOUTH_Y, across, down, INTERIOR)


def _mixed(color: Color, other: Color, fraction: float) -> Color:
    red, green, blue = (round(a * (1 - fraction) + b * fraction) for a, b in zip(color, other, strict=True))
    return red, green, blue


def _jittered(rng: random.Random, color: Color) -> Color:
    red, green, blue = (min(255, max(0, value + rng.randint(-12, 12))) for value in color)
    return red, green, blue


def _bytes(color: tuple[float, float, float]) -> Color:
    red, green, blue = (round(255 * value) for value in color)
    return red, green, blue
