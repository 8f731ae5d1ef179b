"""A large latent as interlaced small ones: patch (i, j) holds every s-th row from i and every s-th column from j.

    s = 2      0 1 0 1     patch 0 is the anchor
               2 3 2 3     every patch is the whole image at native size, and white noise stays white in it
               0 1 0 1
               2 3 2 3

A side that is no multiple of s * `unit` is padded by reflection and cropped again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.strategies.structure.sizing import scale_of


@dataclass(frozen=True, slots=True)
class Interlace:
    """`size` (H, W) of a latent, the number of patches along each side, and the `unit` of a patch's sides."""

    size: tuple[int, int]
    scales: tuple[int, int]
    unit: int = 1

    @classmethod
    def of(cls, size: tuple[int, int], native: tuple[int, int], unit: int = 1) -> "Interlace":
        """Return the interlace whose patches are nearest to the native size."""
        return cls(size, (scale_of(size[0], native[0]), scale_of(size[1], native[1])), unit)

    def __len__(self) -> int:
        return self.scales[0] * self.scales[1]

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch."""
        height, width = (
            -(-side // (scale * self.unit)) * self.unit for side, scale in zip(self.size, self.scales, strict=True)
        )
        return height, width

    @property
    def exact(self) -> bool:
        """Whether the patches hold the latent without padding."""
        return tuple(side * scale for side, scale in zip(self.patch_size, self.scales, strict=True)) == self.size

    def split(self, x_BCHW: Tensor) -> Tensor:
        """Return all patches, the anchor first: x_NBChw."""
        (height, width), (down, across) = self.patch_size, self.scales
        more = (0, across * width - x_BCHW.shape[-1], 0, down * height - x_BCHW.shape[-2])
        canvas = F.pad(x_BCHW, more, mode="reflect") if any(more) else x_BCHW
        batch, channels = canvas.shape[:2]
        cells = canvas.reshape(batch, channels, height, down, width, across)
        return cells.permute(3, 5, 0, 1, 2, 4).reshape(len(self), batch, channels, height, width)

    @property
    def anchor_positions(self) -> Tensor:
        """Return the indices into the flattened latent that the anchor consists of, in its order: int64, [h * w]."""
        positions = torch.arange(self.size[0] * self.size[1], dtype=torch.float64)  # integers are not reflected
        return self.split(positions.view(1, 1, *self.size))[0].flatten().long()

    def join(self, x_NBChw: Tensor) -> Tensor:
        """Return the latent that consists of these patches: x_BCHW."""
        (height, width), (down, across) = x_NBChw.shape[-2:], self.scales
        batch, channels = x_NBChw.shape[1:3]
        cells = x_NBChw.reshape(down, across, batch, channels, height, width).permute(2, 3, 4, 0, 5, 1)
        canvas = cells.reshape(batch, channels, down * height, across * width)
        return canvas[..., : self.size[0], : self.size[1]]

    def enlarge(self, x_BChw: Tensor) -> Tensor:
        """Return the anchor x_BChw interpolated (bicubic) at the positions of each patch: x_NBChw."""
        height, width = x_BChw.shape[-2:]
        down, across = self.scales
        edged = F.pad(x_BChw, (0, 1, 0, 1), mode="replicate")
        between = F.interpolate(edged, (down * height + 1, across * width + 1), mode="bicubic", align_corners=True)
        whole = Interlace((down * height, across * width), self.scales)
        return whole.split(between[..., :-1, :-1])

    def repeat(self, x_BChw: Tensor) -> Tensor:
        """Return the anchor x_BChw repeated for every patch: x_NBChw."""
        return x_BChw.expand(len(self), *x_BChw.shape)
