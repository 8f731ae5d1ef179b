"""Bytes of tensors beside the weights: of a call on one device, and on a rank of a plan."""

import math
from dataclasses import dataclass, field, replace

from patchpar.models.dry_run.kept_tokens import Attentions

VAE_MARGIN = 1.15
"""What a rank of n takes at most of a VAE, times n, of what one device takes: as tests/vae measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """The most bytes of a call on one device while encoding, denoising and decoding, and the attentions of a step."""

    encode: int = 0
    denoise: int = 0
    decode: int = 0
    attentions: Attentions = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return max(self.encode, self.denoise, self.decode)

    def divided(self, ranks: int) -> "CallMemory":
        """Return about what each rank has of a call whose image is divided between so many."""
        return replace(self, denoise=self.denoise // ranks)

    def decode_on_rank(self, ranks: int) -> int:
        """Return the most bytes while decoding on one of so many ranks of an image, which decode it in bands."""
        return self.decode if ranks == 1 else min(self.decode, math.ceil(self.decode * VAE_MARGIN / ranks))

    def on_rank(self, ranks: int) -> int:
        """Return the most bytes on one of so many ranks of an image."""
        return max(self.encode, self.denoise, self.decode_on_rank(ranks))


NO_CALL = CallMemory()
