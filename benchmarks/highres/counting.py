"""How many objects of a colour an image shows: connected regions of that hue.

Only captions whose colours nothing else in the scene has can be counted: red houses (their roofs are nearly red), red
and purple balloons, at noon or at night, on green hills or snowy mountains (a lake would show each twice). Renders are
counted right, see `accuracy`.
"""

from __future__ import annotations

import colorsys
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.latents import to_tensor
from training.objects import PAINT
from training.render import render
from training.scenes import SIDES, Item, Scene, caption

LOOKS = (("house", "red"), ("balloon", "red"), ("balloon", "purple"))
TERRAINS, TIMES = ("green hills", "snowy mountains"), ("at noon", "at night")
SEEN = 128  # images are looked at with their shorter side at this many pixels
LEAST = 60  # pixels of the smallest region that counts, at that size
CLOSED = 5  # gaps up to this wide do not part an object: the stripe of a balloon, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A caption, and how many objects of each colour it asks for."""

    caption: str
    colors: tuple[str, ...]
    scene: Scene


def subjects(count: int, *, seed: int = 0) -> list[Subject]:
    """So many captions that can be counted, always the same for a seed."""
    rng = random.Random(f"count {seed}")
    return [_subject(rng) for _ in range(count)]


def _subject(rng: random.Random) -> Subject:
    looks = [rng.choice(LOOKS)]
    if rng.random() < 2 / 3:
        looks.append(rng.choice([look for look in LOOKS if look[1] != looks[0][1]]))
    items = tuple(Item(kind=kind, color=color, side=side) for (kind, color), side in zip(looks, SIDES, strict=False))
    scene = Scene(time=rng.choice(TIMES), terrain=rng.choice(TERRAINS), items=items)
    return Subject(caption=caption(scene), colors=tuple(color for _, color in looks), scene=scene)


def objects(image_CHW: Tensor, color: str) -> int:
    """Regions of a colour in an image (3, H, W) in 0..1."""
    scale = SEEN / min(image_CHW.shape[-2:])
    small = F.interpolate(image_CHW[None], scale_factor=scale, mode="area" if scale < 1 else "bilinear")[0]
    displayed = _of_hue(small.clamp(0, 1), colorsys.rgb_to_hsv(*(part / 255 for part in PAINT[color]))[0])
    return _regions(displayed)


def miscounted(image_CHW: Tensor, subject: Subject) -> float:
    """By how many an image differs from one object of each colour of its caption, per object."""
    return sum(abs(objects(image_CHW, color) - 1) for color in subject.colors) / len(subject.colors)


def _of_hue(image_CHW: Tensor, hue: float) -> Tensor:
    """Where the hue is within 20 degrees, and there is colour."""
    most, least = image_CHW.amax(0), image_CHW.amin(0)
    red, green, blue = image_CHW
    chroma = (most - least).clamp_min(1e-6)
    sixth = torch.where(
        most == red,
        ((green - blue) / chroma) % 6,
        torch.where(most == green, (blue - red) / chroma + 2, (red - green) / chroma + 4),
    )
    away = ((sixth / 6 - hue + 0.5) % 1 - 0.5).abs()
    return (away < 20 / 360) & (chroma > 0.45 * most) & (most > 0.2)


def _regions(displayed_HW: Tensor) -> int:
    """Connected regions of at least LEAST pixels, small gaps closed."""
    solid = displayed_HW[None, None].float()
    closed = -F.max_pool2d(-F.max_pool2d(solid, CLOSED, 1, CLOSED // 2), CLOSED, 1, CLOSED // 2) > 0.5
    labels = torch.arange(1.0, closed.numel() + 1).reshape(closed.shape) * closed
    while True:
        spread = F.max_pool2d(labels, 3, 1, 1) * closed
        if torch.equal(spread, labels):
            break
        labels = spread
    _, sizes = labels[closed].unique(return_counts=True)
    return int((sizes >= LEAST).sum())


def accuracy(count: int, *, side: int = 256) -> float:
    """The share of rendered scenes that are counted right."""
    right = 0
    for number, subject in enumerate(subjects(count, seed=1)):
        displayed = render(subject.scene, random.Random(number), height=side, width=side)
        right += miscounted((to_tensor(displayed.pixels)[0] + 1) / 2, subject) == 0
    return right / count
