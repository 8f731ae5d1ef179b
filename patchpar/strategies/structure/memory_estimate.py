"""Estimate of the memory that a large image needs beside the network, before anything is allocated. No torch.

latents     whole on every rank: the sample, sums of windows, estimates and the scheduler's state
decoding    the VAE's feature maps at full size, a part of them on each rank
"""

from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.models.info import PipelineInfo

COPIES = 12
"""Copies in fp32 of the latents of all guidance branches that a rank holds at most in a step."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes: `latents` on each rank, `decoding` on all ranks together."""

    latents: int
    decoding: int

    @classmethod
    def of(cls, model: PipelineInfo, size: tuple[int, int], branches: int) -> "MemoryEstimate":
        """Return the estimate for an image of `size` (height, width) in pixels."""
        pixels, side = size[0] * size[1], model.vae_scale
        latents = COPIES * branches * model.latent_channels * (pixels // side**2) * 4
        return cls(latents=latents, decoding=pixels * model.decoded_bytes)

    def __str__(self) -> str:
        return f"{self.latents / GIB:.2g} GiB of latents on each rank, {self.decoding / GIB:.2g} GiB to decode them"


def check_room(model: PipelineInfo, size: tuple[int, int], branches: int, *, ranks: int, free: int | None) -> None:
    """Raise PlanError for an image whose latents on `ranks` ranks exceed the `free` bytes that the ranks share."""
    need = MemoryEstimate.of(model, size, branches).latents * ranks
    if free is None or need <= free:
        return
    unit, shrunk = model.size_unit, (free / need) ** 0.5
    height, width = (max(unit, int(side * shrunk) // unit * unit) for side in size)
    each = "rank" if ranks == 1 else "ranks"
    raise PlanError(
        f"{size[0]} x {size[1]} pixels need about {need / GIB:.1f} GiB for their latents on {ranks} {each}, but only "
        f"{free / GIB:.1f} GiB are free: ask for at most {height} x {width}"
    )
