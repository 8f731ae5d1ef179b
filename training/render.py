"""Scenes to images of any size and aspect: sky, sun or moon, terrain, objects, and a lake that mirrors it all.

Lengths are in `unit`, the shorter side of the canvas, so that objects keep their shape at every aspect; places across
the image are in parts of its width. Everything random comes from one generator, in an order that does not depend on
the size: the same seed gives the same scene at every resolution of an aspect.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from training.objects import EXTENTS, Brush, Color, mixed, render_object, scaled
from training.scenes import Item, Scene, caption, sample_scene

_SUPERSAMPLE = 2
_SKY: dict[str, tuple[Color, Color]] = {
    "at noon": ((70, 140, 225), (190, 225, 250)),
    "at sunset": ((90, 60, 130), (255, 170, 90)),
    "at night": ((10, 14, 45), (45, 60, 110)),
}
_LIGHT = {"at noon": 1.0, "at sunset": 0.78, "at night": 0.42}
_ORB: dict[str, tuple[Color, float, float]] = {
    "at noon": ((255, 245, 170), 0.14, 0.06),
    "at sunset": ((255, 110, 60), 0.40, 0.06),
    "at night": ((240, 240, 225), 0.17, 0.07),
}
"""Colour of the sun or moon, and the middle and half range of its height from the top, in parts of the height."""
_GROUND: dict[str, tuple[Color, Color, float]] = {
    "green hills": ((110, 180, 90), (70, 140, 60), 0.05),
    "snowy mountains": ((235, 240, 248), (200, 212, 228), 0.015),
    "desert dunes": ((235, 195, 125), (205, 155, 90), 0.035),
    "a calm lake": ((120, 170, 110), (80, 130, 80), 0.006),
}
"""Far and near colour of the ground, and the height of its waves in units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedImage:
    """A rendered scene: pixels (H, W, 3) uint8, and one box (left, top, right, bottom) in pixels per object image."""

    pixels: np.ndarray
    boxes: tuple[tuple[float, float, float, float], ...]
    scene: Scene
    caption: str


@dataclass(slots=True, kw_only=True)
class _Canvas:
    image: Image.Image
    draw: ImageDraw.ImageDraw
    rng: random.Random
    scene: Scene

    @property
    def unit(self) -> int:
        return min(self.image.size)

    @property
    def light(self) -> float:
        return _LIGHT[self.scene.time]


def scene_of(seed: int | str, *, held_out: bool = False) -> Scene:
    """The scene of that seed, not rendered."""
    return _begun(seed, held_out)[1]


def _begun(seed: int | str, held_out: bool) -> tuple[random.Random, Scene]:
    rng = random.Random(f"scene {seed}")
    return rng, sample_scene(rng, held_out=held_out)


def sample_render(seed: int | str, *, height: int, width: int, held_out: bool = False) -> RenderedImage:
    """The image of that seed: a random scene, rendered. height and width in pixels."""
    rng, scene = _begun(seed, held_out)
    words = caption(scene, right_first=rng.random() < 0.5)
    return render(scene, rng, height=height, width=width, words=words)


def render(
    scene: Scene,
    rng: random.Random,
    *,
    height: int,
    width: int,
    words: str = "",
    repeated: Collection[str] = (),
) -> RenderedImage:
    """Draw a scene; the generator decides all that the caption leaves open (places, sizes, slopes).

    The objects of the sides `repeated` are there twice, which no caption says: to train and test who counts them.
    """
    tall, wide = height * _SUPERSAMPLE, width * _SUPERSAMPLE
    horizon = int(tall * rng.uniform(0.50, 0.60))
    image = _sky(scene.time, tall, wide, horizon)
    canvas = _Canvas(image=image, draw=ImageDraw.Draw(image), rng=rng, scene=scene)
    _orb(canvas, horizon)
    _mountains(canvas, horizon)
    _ground(canvas, horizon)
    shore_line = horizon + 0.06 * canvas.unit
    boxes = _objects(canvas, shore_line, repeated)
    if scene.terrain == "a calm lake":
        shore = int(shore_line + 0.075 * canvas.unit)
        _reflection(canvas, shore)
        boxes += [(left, 2 * shore - bottom, right, 2 * shore - top) for left, top, right, bottom in boxes]
    scaled_boxes = tuple(tuple(side / _SUPERSAMPLE for side in box) for box in boxes)
    pixels = np.asarray(image.reduce(_SUPERSAMPLE))
    return RenderedImage(pixels=pixels, boxes=scaled_boxes, scene=scene, caption=words or caption(scene))  # type: ignore[arg-type]


def _sky(time: str, tall: int, wide: int, horizon: int) -> Image.Image:
    top, low = (np.array(color, dtype=np.float64) for color in _SKY[time])
    ramp = np.linspace(0, 1, horizon)[:, None]
    column = np.empty((tall, 1, 3), np.uint8)
    column[:horizon, 0] = (top * (1 - ramp) + low * ramp).astype(np.uint8)
    column[horizon:, 0] = low
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(column, (tall, wide, 3))))


def _orb(canvas: _Canvas, horizon: int) -> None:
    wide, tall = canvas.image.size
    rng, draw, unit = canvas.rng, canvas.draw, canvas.unit
    for _ in range(26):
        x, y, size = rng.random() * wide, rng.random() * horizon * 0.85, rng.choice((2, 3, 3, 4)) * unit / 512
        if canvas.scene.time == "at night":
            draw.ellipse([x - size, y - size, x + size, y + size], fill=(235, 235, 215))
    color, middle, spread = _ORB[canvas.scene.time]
    x, y, radius = rng.uniform(0.12, 0.88) * wide, (middle + rng.uniform(-spread, spread)) * tall, 0.065 * unit
    for glow, fraction in ((2.0, 0.18), (1.5, 0.36)):
        behind = canvas.image.getpixel((int(x), max(0, int(y - radius * 1.8))))
        edge = radius * glow
        draw.ellipse([x - edge, y - edge, x + edge, y + edge], fill=mixed(behind, color, fraction))  # type: ignore[arg-type]
    draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=color)


def _mountains(canvas: _Canvas, horizon: int) -> None:
    terrain, wide, unit = canvas.scene.terrain, canvas.image.size[0], canvas.unit
    if terrain not in ("snowy mountains", "a calm lake"):
        return
    snowy, light = terrain == "snowy mountains", canvas.light
    rock = mixed(scaled((105, 115, 140), max(light, 0.5)), _SKY[canvas.scene.time][1], 0.25)
    count = round(3 * wide / unit)
    for peak in range(count):
        x = wide * (peak + canvas.rng.uniform(0.2, 0.8)) / count
        rise = unit * (canvas.rng.uniform(0.22, 0.36) if snowy else canvas.rng.uniform(0.10, 0.18))
        half = rise * canvas.rng.uniform(1.0, 1.4)
        canvas.draw.polygon([(x - half, horizon), (x, horizon - rise), (x + half, horizon)], fill=rock)
        if snowy:
            cap = ((-0.4, 0.6), (0, 1), (0.4, 0.6), (0.15, 0.68), (0, 0.55), (-0.18, 0.68))
            points = [(x + half * across, horizon - rise * up) for across, up in cap]
            canvas.draw.polygon(points, fill=scaled((250, 250, 255), max(light, 0.6)))


def _ground(canvas: _Canvas, horizon: int) -> None:
    far, near, wave = _GROUND[canvas.scene.terrain]
    unit = canvas.unit
    _wave(canvas, horizon, wave * unit, canvas.rng.uniform(5, 9), scaled(far, canvas.light))
    if canvas.scene.terrain == "a calm lake":
        wide, tall = canvas.image.size
        canvas.draw.rectangle([0, horizon + 0.03 * unit, wide, tall], fill=scaled(far, canvas.light))
    else:
        frequency = canvas.rng.uniform(4, 8)
        _wave(canvas, horizon + 0.2 * unit, 1.2 * wave * unit, frequency, scaled(near, canvas.light))


def _wave(canvas: _Canvas, y: float, height: float, frequency: float, color: Color) -> None:
    wide, tall = canvas.image.size
    phase, unit = canvas.rng.uniform(0, 2 * math.pi), canvas.unit
    step = max(1, unit // 64)
    crest = [(x, y + height * math.sin(x / unit * frequency + phase)) for x in range(0, wide + step, step)]
    canvas.draw.polygon([(0, tall), *crest, (crest[-1][0], tall)], fill=color)


def _objects(canvas: _Canvas, ground: float, repeated: Collection[str]) -> list[tuple[float, float, float, float]]:
    boxes = []
    wide, unit, rng = canvas.image.size[0], canvas.unit, canvas.rng
    for item in canvas.scene.items:
        across = rng.uniform(0.20, 0.33)
        x = wide * (across if item.side == "left" else 1 - across)
        drop = rng.uniform(0.1, 0.2)
        y = ground + unit * (0.06 if canvas.scene.terrain == "a calm lake" else drop)
        size = unit / 512 * rng.uniform(1.0, 1.25)
        if item.side in repeated:
            _twin(canvas, item, x, y, size)
        render_object(Brush(draw=canvas.draw, x=x, y=y, unit=size, light=canvas.light), item.kind, item.color)
        half, top, bottom = EXTENTS[item.kind]
        boxes.append((x - half * size, y + top * size, x + half * size, y + bottom * size))
    return boxes


def _twin(canvas: _Canvas, item: Item, x: float, y: float, size: float) -> None:
    """The same object once more on its side of the image, beside or above the one at x, y, as weak models repeat it."""
    rng = canvas.rng
    half, top, bottom = EXTENTS[item.kind]
    step = rng.uniform(1.0, 1.8) * half * size
    low, high = (0.05, 0.43) if item.side == "left" else (0.57, 0.95)
    wide = canvas.image.size[0]
    beside = [at for at in (x - step, x + step) if low * wide <= at <= high * wide]
    if beside and rng.random() < 2 / 3:
        x = rng.choice(beside)
        y += rng.uniform(-0.15, 0.1) * (bottom - top) * size
    else:
        x += rng.uniform(-0.3, 0.3) * half * size
        y += rng.choice((-1, 1)) * rng.uniform(0.5, 0.8) * (bottom - top) * size
    smaller = size * rng.uniform(0.75, 1.0)
    render_object(Brush(draw=canvas.draw, x=x, y=y, unit=smaller, light=canvas.light), item.kind, item.color)


def _reflection(canvas: _Canvas, shore: int) -> None:
    wide, tall = canvas.image.size
    depth = tall - shore
    above = canvas.image.crop((0, shore - depth, wide, shore)).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    water = Image.new("RGB", above.size, scaled((60, 110, 170), max(canvas.light, 0.45)))
    canvas.image.paste(Image.blend(above, water, 0.38), (0, shore))
    line = 3 * canvas.unit / 512
    canvas.draw.rectangle([0, shore - line, wide, shore + line * 2 / 3], fill=scaled((200, 190, 150), canvas.light))
