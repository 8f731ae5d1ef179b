"""What an image shows: a small network that names the object on each side, the terrain and the time of day.

    python -m training.classifier --steps 3000          # writes training/classifier.safetensors

It is trained on renders alone, never on generated images, and has to name held-out renders before it may judge.
Each half of an image is looked at separately, the right one in a mirror, so "left" and "right" cannot be confused.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.judges import fit, load_into, looked_at, main_of, render_size, worn
from training.latents import to_tensor
from training.render import sample_render
from training.scenes import LOOKS, SIDES, TERRAINS, TIMES, Look, Scene, look_indices, look_of

WEIGHTS = Path(__file__).with_name("classifier.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the classifier sees."""

    left: Look | None
    right: Look | None
    terrain: str
    time: str

    def on(self, side: str) -> Look | None:
        """What is on that side."""
        return self.left if side == "left" else self.right


class Classifier(nn.Module):
    """Images (B, 3, H, W) in -1..1 to logits: looks (B, 2, 21), terrain (B, 4), time (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 96, 128)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        self.trunk = nn.Sequential(*layers, nn.Conv2d(128, 128, 3, padding=1), nn.SiLU())
        self.look = nn.Linear(256, len(LOOKS))
        self.terrain = nn.Linear(256, len(TERRAINS))
        self.time = nn.Linear(256, len(TIMES))

    def forward(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the two sides, the terrain and the time."""
        left, right = image_BCHW.chunk(2, -1)
        seen = self.trunk(torch.cat([left, right.flip(-1)]))
        features = torch.cat([seen.mean((2, 3)), seen.amax((2, 3))], 1)
        sides = torch.stack(features.chunk(2), 1)
        whole = sides.mean(1)
        return self.look(sides), self.terrain(whole), self.time(whole)


def targets(scenes: list[Scene]) -> tuple[Tensor, Tensor, Tensor]:
    """Class indices of looks (B, 2), terrains (B) and times (B)."""
    looks = [look_indices(scene) for scene in scenes]
    terrains = [TERRAINS.index(scene.terrain) for scene in scenes]
    return torch.tensor(looks), torch.tensor(terrains), torch.tensor([TIMES.index(scene.time) for scene in scenes])


def judge(classifier: Classifier, images_BCHW: Tensor) -> list[Judgement]:
    """What the images (B, 3, H, W) in -1..1 show, whatever their size."""
    with torch.no_grad():
        look, terrain, time = (logits.argmax(-1).tolist() for logits in classifier(looked_at(images_BCHW)))
    rows = zip(look, terrain, time, strict=True)
    return [Judgement(left=LOOKS[a], right=LOOKS[b], terrain=TERRAINS[c], time=TIMES[d]) for (a, b), c, d in rows]


def load_classifier(path: Path = WEIGHTS) -> Classifier:
    """The trained classifier."""
    return load_into(Classifier(), path)


def accuracy(classifier: Classifier, count: int, *, height: int = 256, width: int = 256) -> dict[str, float]:
    """Share of held-out renders of that size whose two looks, terrain and time are named rightly."""
    right = {"objects": 0, "terrain": 0, "time": 0}
    for seed in range(count):
        displayed = sample_render(f"judge {seed}", height=height, width=width, held_out=True)
        judgement = judge(classifier, to_tensor(displayed.pixels))[0]
        right["objects"] += all(judgement.on(side) == look_of(displayed.scene.on(side)) for side in SIDES)
        right["terrain"] += judgement.terrain == displayed.scene.terrain
        right["time"] += judgement.time == displayed.scene.time
    return {name: hits / count for name, hits in right.items()}


def train(steps: int, *, batch: int = 48, rate: float = 2e-3, seed: int = 0) -> Classifier:
    """A classifier trained on fresh renders, made a little blurred and noisy so that it does not cling to edges."""
    torch.manual_seed(seed)
    classifier = Classifier()
    return fit(classifier, partial(_loss, classifier, batch), steps=steps, rate=rate, seed=seed)


def _loss(classifier: Classifier, batch: int, key: str) -> Tensor:
    rng = random.Random(f"judge {key}")
    height, width = render_size(rng)
    displayed = [sample_render(f"judge train {key} {index}", height=height, width=width) for index in range(batch)]
    images = worn(torch.cat([to_tensor(one.pixels) for one in displayed]), rng)
    wanted = targets([one.scene for one in displayed])
    look, terrain, time = classifier(images)
    return (
        functional.cross_entropy(look.flatten(0, 1), wanted[0].flatten())
        + 0.3 * functional.cross_entropy(terrain, wanted[1])
        + 0.3 * functional.cross_entropy(time, wanted[2])
    )


def main() -> None:
    """Train, print the accuracy on held-out renders, save."""
    main_of(__doc__, train, accuracy, steps=3000, output=WEIGHTS)


if __name__ == "__main__":
    main()
