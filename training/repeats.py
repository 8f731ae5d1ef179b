"""Who counts objects: a small network that says of each side whether its object is there more than once.

    python -m training.repeats --steps 2600          # writes training/repeats.safetensors

A model that is not trained enough gives a house a twin or a second storey, which the classifier of looks does not
mind. This one is trained on renders in which objects are repeated on purpose, and has to tell held-out renders with
and without twins apart before it may count.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.classifier import Classifier, load_classifier
from training.judges import fit, load_into, looked_at, main_of, render_size, worn
from training.latents import to_tensor
from training.render import render
from training.scenes import SIDES, sample_scene

WEIGHTS = Path(__file__).with_name("repeats.safetensors")
REPEATED = 0.4
"""Part of the objects that are rendered twice."""


class RepeatCounter(nn.Module):
    """Images (B, 3, H, W) in -1..1 to logits (B, 2): whether the object of the left, of the right is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Classifier().trunk
        self.repeated = nn.Sequential(nn.Linear(256, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Logits of the two sides."""
        left, right = image_BCHW.chunk(2, -1)
        seen = self.trunk(torch.cat([left, right.flip(-1)]))
        logits = self.repeated(torch.cat([seen.mean((2, 3)), seen.amax((2, 3))], 1))
        return torch.cat(logits.chunk(2), 1)


def repeats(counter: RepeatCounter, images_BCHW: Tensor) -> list[frozenset[str]]:
    """The sides of each image (B, 3, H, W) in -1..1 on which an object is there more than once."""
    with torch.no_grad():
        found = counter(looked_at(images_BCHW)) > 0
    return [frozenset(side for side, twice in zip(SIDES, row, strict=True) if twice) for row in found.tolist()]


def load_counter(path: Path = WEIGHTS) -> RepeatCounter:
    """The trained counter."""
    return load_into(RepeatCounter(), path)


def sample_repeated(key: str, *, height: int, width: int, held_out: bool = False) -> tuple[Tensor, frozenset[str]]:
    """An image (1, 3, H, W) in -1..1 of a random scene, and the sides on which its object is rendered twice."""
    rng = random.Random(f"repeated {key}")
    scene = sample_scene(rng, held_out=held_out)
    twice = frozenset(item.side for item in scene.items if rng.random() < REPEATED)
    return to_tensor(render(scene, rng, height=height, width=width, repeated=twice).pixels), twice


def accuracy(counter: RepeatCounter, count: int, *, height: int = 256, width: int = 256) -> float:
    """Share of held-out renders of that size of which both sides are counted rightly."""
    right = 0
    for index in range(count):
        image, twice = sample_repeated(f"count {index}", height=height, width=width, held_out=True)
        right += repeats(counter, image)[0] == twice
    return right / count


def train(steps: int, *, batch: int = 32, rate: float = 1e-3, seed: int = 0) -> RepeatCounter:
    """A counter trained on fresh renders; it starts from what the classifier of looks has learnt to see."""
    torch.manual_seed(seed)
    counter = RepeatCounter()
    counter.trunk.load_state_dict(load_classifier().trunk.state_dict())
    return fit(counter, partial(_loss, counter, batch), steps=steps, rate=rate, seed=seed)


def _loss(counter: RepeatCounter, batch: int, key: str) -> Tensor:
    rng = random.Random(f"count {key}")
    height, width = render_size(rng)
    rendered = [sample_repeated(f"train {key} {index}", height=height, width=width) for index in range(batch)]
    images = worn(torch.cat([image for image, _ in rendered]), rng)
    wanted = torch.tensor([[float(side in twice) for side in SIDES] for _, twice in rendered])
    return functional.binary_cross_entropy_with_logits(counter(images), wanted)


def main() -> None:
    """Train, print the accuracy on held-out renders, save."""
    main_of(__doc__, train, accuracy, steps=2600, output=WEIGHTS)


if __name__ == "__main__":
    main()
