"""What is trained when: stages of growing images, each a mixture of sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Images of one size that are trained together: height and width in latent cells.

    noise_shift is the middle of the noise levels on the logit scale: 0 is timestep 500, 1.4 is timestep 800.
    """

    height: int
    width: int
    batch: int
    fraction: float
    noise_shift: float = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A mixture of sizes."""

    name: str
    buckets: tuple[Bucket, ...]

    def sample(self, key: str) -> Bucket:
        """The bucket of one training step, by its share; the same for the same key."""
        parts = [bucket.fraction for bucket in self.buckets]
        return random.Random(f"bucket {self.name} {key}").choices(self.buckets, parts)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the steps of a stage: a short rise, a flat part, a straight line towards zero."""

    steps: int
    peak: float
    rise: int = 60
    decay_from: float = 0.6

    def rate(self, step: int) -> float:
        """The learning rate at a step counted from 0."""
        start = self.decay_from * self.steps
        falling = (self.steps - step) / max(1.0, self.steps - start)
        return self.peak * min(1.0, (step + 1) / self.rise, max(falling, 0.02))


def _bucket(height: int, width: int, batch: int, fraction: float) -> Bucket:
    return Bucket(height=height, width=width, batch=batch, fraction=fraction)


TINY = Stage(name="tiny", buckets=(_bucket(16, 16, 64, 0.5), _bucket(32, 32, 24, 0.5)))
SMALL = Stage(name="small", buckets=(_bucket(32, 32, 24, 0.6), _bucket(48, 32, 16, 0.2), _bucket(32, 48, 16, 0.2)))
MIXED = Stage(
    name="mixed",
    buckets=(
        *(_bucket(32, 32, 24, 0.3), _bucket(48, 32, 16, 0.06), _bucket(32, 48, 16, 0.06)),
        *(_bucket(64, 64, 8, 0.44), _bucket(96, 64, 6, 0.07), _bucket(64, 96, 6, 0.07)),
    ),
)
LARGE = Stage(
    name="large",
    buckets=(_bucket(64, 64, 8, 0.64), _bucket(96, 64, 6, 0.12), _bucket(64, 96, 6, 0.12), _bucket(128, 128, 2, 0.12)),
)
STAGES = {stage.name: stage for stage in (TINY, SMALL, MIXED, LARGE)}
"""Of the UNet."""
DIT_SMALL = Stage(name="small", buckets=(_bucket(32, 32, 32, 0.75), _bucket(64, 64, 12, 0.25)))
DIT_SQUARE = Stage(name="square", buckets=(_bucket(64, 64, 16, 1.0),))
DIT_MIXED = Stage(
    name="mixed", buckets=(_bucket(64, 64, 16, 0.7), _bucket(96, 64, 10, 0.15), _bucket(64, 96, 10, 0.15))
)
DIT_STAGES = {stage.name: stage for stage in (DIT_SMALL, DIT_SQUARE, DIT_MIXED)}
"""Of the DiT: a token is 4x4 cells."""
