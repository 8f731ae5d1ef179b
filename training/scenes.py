"""The world the embedded model knows: captioned landscapes with one or two objects, drawn from a seed.

A scene is a terrain, a time of day and one or two objects, each on its side. The caption says all of it and nothing
else, so whether an image follows its caption can be decided exactly. About one scene in twelve is held out of
training; the split is closed under mirroring, so that a flipped training image never becomes a held-out one.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

TERRAINS = ("green hills", "snowy mountains", "desert dunes", "a calm lake")
TIMES = ("at noon", "at sunset", "at night")
KINDS = ("house", "tree", "pine", "balloon", "tower")
COLORS = ("red", "blue", "yellow", "white", "purple", "orange")
SIDES = ("left", "right")
COLORLESS = ("tree", "pine")
"""Kinds that are always green: their caption names no colour."""

Look = tuple[str, str | None]
LOOKS: tuple[Look | None, ...] = (
    None,
    *((kind, None) for kind in COLORLESS),
    *((kind, color) for kind in KINDS if kind not in COLORLESS for color in COLORS),
)
"""Everything that can be on one side: nothing, or a kind in a colour."""

_HELD_OUT_ONE_IN = 12
_MOST_HELD_OUT = 256
"""Of some 700 held-out captions; beyond this the search for new ones gets slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object: its kind, its colour (None for the kinds that have none) and its side."""

    kind: str
    color: str | None
    side: str

    @property
    def phrase(self) -> str:
        """The object with its article, for example "an orange balloon"."""
        words = self.kind if self.color is None else f"{self.color} {self.kind}"
        return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What an image shows. Items are ordered left, right."""

    time: str
    terrain: str
    items: tuple[Item, ...]

    def on(self, side: str) -> Item | None:
        """The object on that side, or None."""
        return next((item for item in self.items if item.side == side), None)


def look_of(item: Item | None) -> Look | None:
    """The look of an object of a scene, or None where there is none."""
    return None if item is None else (item.kind, item.color)


def look_indices(scene: Scene) -> list[int]:
    """Which of LOOKS is on the left and which on the right."""
    return [LOOKS.index(look_of(scene.on(side))) for side in SIDES]


def flipped(scene: Scene) -> Scene:
    """The scene seen in a mirror: left and right change places."""
    mirror = {"left": "right", "right": "left"}
    items = (replace(item, side=mirror[item.side]) for item in scene.items)
    return replace(scene, items=tuple(sorted(items, key=lambda item: item.side)))


def caption(scene: Scene, *, right_first: bool = False) -> str:
    """The scene in words, for example "a red house on the left and a pine on the right, green hills at noon"."""
    items = scene.items[::-1] if right_first else scene.items
    objects = " and ".join(f"{item.phrase} on the {item.side}" for item in items)
    return f"{objects}, {scene.terrain} {scene.time}"


def is_held_out(scene: Scene) -> bool:
    """Whether the scene is kept for evaluation. The same for a scene and its mirror image."""
    objects = sorted(item.phrase for item in scene.items)
    key = "|".join((scene.time, scene.terrain, *objects))
    return zlib.crc32(key.encode()) % _HELD_OUT_ONE_IN == 0


def sample_scene(rng: random.Random, *, held_out: bool = False) -> Scene:
    """A random scene of the training part (or of the held-out part) of the split."""
    while True:
        scene = _any_scene(rng)
        if is_held_out(scene) == held_out:
            return scene


def held_out_captions(count: int, *, seed: int = 0) -> list[tuple[str, Scene]]:
    """That many different held-out captions with their scenes, always the same for a seed.

    Raises ValueError if there are too few.
    """
    if count > _MOST_HELD_OUT:
        raise ValueError(f"{count} held-out captions asked for, the limit is {_MOST_HELD_OUT}: ask for fewer")
    rng = random.Random(f"held-out {seed}")
    found: dict[str, Scene] = {}
    while len(found) < count:
        scene = sample_scene(rng, held_out=True)
        found.setdefault(caption(scene, right_first=rng.random() < 0.5), scene)
    return list(found.items())


def vocabulary() -> list[str]:
    """Every word that a caption can contain, sorted."""
    words = {"a", "an", "and", "on", "the", *KINDS, *COLORS, *SIDES}
    for phrase in (*TERRAINS, *TIMES):
        words.update(phrase.split())
    return sorted(words)


def _any_scene(rng: random.Random) -> Scene:
    time, terrain = rng.choice(TIMES), rng.choice(TERRAINS)
    sides = SIDES if rng.random() < 2 / 3 else (rng.choice(SIDES),)
    return Scene(time=time, terrain=terrain, items=tuple(_any_item(rng, side) for side in sides))


def _any_item(rng: random.Random, side: str) -> Item:
    kind = rng.choice(KINDS)
    return Item(kind=kind, color=None if kind in COLORLESS else rng.choice(COLORS), side=side)
