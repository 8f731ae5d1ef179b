"""`SpeechConfig`: how speech reaches a Wan-S2V transformer, and which samples one block of a stream needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_number, is_whole, make_plain

AFTER = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)
"""Blocks of the published transformer that are followed by audio attention."""
PER_LATENT = 4
"""Images per latent frame: two convolutions of stride 2."""
REACH = 8
"""Images before a latent frame's own that its convolutions read: 2 + 2 * 1 + 2 * 2."""
LIMITS = {
    "dim": 2**16,
    "heads": 2**16,
    "layers": 2**12,
    "features": 2**16,
    "tokens": 2**12,
    "channels": 2**12,
    "rate": 2**20,
    "context": 2**12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechConfig:
    """Sizes of a Wan-S2V model. Raises PlanError.

    `dim`, `heads`: of the transformer. `after`: indices of the blocks that are followed by audio attention. `layers`,
    `features`: number and width of wav2vec2's hidden states. `tokens`: audio tokens per latent frame, without the
    padding token and the global one. `channels`: of latents. `rate`: samples per second. `fps`: images per second.
    `context`: images before a block whose samples wav2vec2 hears with it. `continues`: convolutions also read features
    of the 8 images before a block; False begins anew with each block, as Live Avatar does.
    """

    dim: int
    heads: int
    after: tuple[int, ...] = AFTER
    layers: int = 25
    features: int = 1024
    tokens: int = 4
    channels: int = 16
    rate: int = 16000
    fps: float = 25.0
    context: int = 50
    continues: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        for name, most in LIMITS.items():
            if not is_whole(getattr(self, name), name != "context", most):
                raise PlanError(f"{name}={getattr(self, name)!r:.80}: it must be a whole number up to {most}")
        positions = [block for block in self.after if is_whole(block, 0, LIMITS["layers"])]
        if len(set(positions)) < len(self.after):
            raise PlanError(f"after={self.after!r:.80}: it must be indices of different blocks")
        if self.dim % (4 * self.heads):
            raise PlanError(f"dim={self.dim} is no multiple of 4 * heads = {4 * self.heads}")
        if not isinstance(self.continues, bool) or (self.continues and self.context < REACH):
            raise PlanError(f"continues={self.continues!r:.80}: it is true or false, and needs context={REACH} or more")
        if not is_number(self.fps, 1, self.rate) or self.rate % self.fps:
            raise PlanError(f"fps={self.fps!r:.80}: it must divide the rate of {self.rate} samples per second")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "SpeechConfig":
        """Build from the fields of a JSON object. Raises PlanError; TypeError for missing or unknown fields."""
        return cls(**{**facts, "after": tuple(facts.get("after", AFTER))})

    @property
    def per_latent(self) -> int:
        """Images per latent frame after a stream's first one."""
        return PER_LATENT

    @property
    def before(self) -> int:
        """Images before a block whose samples it needs."""
        return self.context

    @property
    def period(self) -> int:
        """Samples per image."""
        return round(self.rate / self.fps)

    def shape(self, frames: int) -> tuple[int, ...]:
        """Return the shape of what a block of `frames` latent frames needs, see `inputs`."""
        return 1, self.context + frames * PER_LATENT, self.period

    def inputs(self, samples_N: Tensor, images: range, latents: range) -> Tensor:
        """Return the samples [1, P, S] of P images of S samples: those of the block `latents`, and `context` before it.

        `samples_N`: mono samples of the images `images` at least, whose last are those of the block. Before the first
        there is silence: also the 3 images that the first latent frame of a stream does not have.
        """
        shape = self.shape(len(latents))
        heard = samples_N[: len(images) * self.period].reshape(-1, self.period)[-shape[1] :]
        silence = heard.new_zeros(shape[1] - len(heard), self.period)
        return torch.cat([silence, heard])[None]
