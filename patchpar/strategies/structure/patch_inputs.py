"""The layout of a denoiser call: its latent and its size conditioning, and the same call for one patch.

    [B, C, H, W]           UNets, SD3, PixArt, Sana
    [B, H/2 * W/2, 4 * C]  FLUX: tokens of 2 x 2 latents, with their positions in img_ids

The call for a patch is a call for an image of the patch's size, which is what the denoiser was trained for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.pytree import with_tensors
from patchpar.errors import UnsupportedModel
from patchpar.shard.batch import SAMPLE_NAMES, sample_of
from patchpar.shard.unet.spatial_arguments import REFUSED, refuse_arguments
from patchpar.shard.verification import Call


@dataclass(frozen=True, slots=True)
class PatchPosition:
    """`size` (h, w) of a patch in latents, and of a window its `corner` (top, left) in the whole latent."""

    size: tuple[int, int]
    corner: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchInputs:
    """One denoiser call: its latent `x_BCHW`, and the same call for a patch. `pixels`: the side of a latent in pixels.

    `size_conditioning`: "native" conditions a patch as an image of its own size. "whole" keeps the sizes of the whole
    image and adds a window's corner to SDXL's crop coordinates, as CutDiffusion (arXiv:2404.15141) does.
    """

    call: Call
    x_BCHW: Tensor
    packed: bool
    pixels: int
    size_conditioning: str = "native"

    @classmethod
    def of(cls, call: Call, *, pixels: int, size_conditioning: str = "native") -> "PatchInputs":
        """Return the layout of a call. Raises UnsupportedModel for an unknown layout."""
        args, kwargs = call
        refuse_whole(kwargs)
        sample, ids, packed = sample_of(args, kwargs), kwargs.get("img_ids"), False
        if isinstance(sample, Tensor) and sample.ndim == 3 and isinstance(ids, Tensor) and ids.shape[-1] == 3:
            rows, columns = (int(ids[..., dim].max()) + 1 for dim in (1, 2))
            if rows * columns == sample.shape[1]:
                sample, packed = unpack(sample, rows, columns), True
        if isinstance(sample, Tensor) and sample.ndim == 4:
            return cls(call=call, x_BCHW=sample, packed=packed, pixels=pixels, size_conditioning=size_conditioning)
        raise UnsupportedModel(
            "structure guidance splits latents of one image, [B, C, H, W] or packed with img_ids as in FLUX, but "
            f"this denoiser was called with {_shape(sample)}: use strategy exact"
        )

    def for_patch(self, x_BChw: Tensor, position: PatchPosition) -> Call:
        """Return the same call for the patch x_BChw, with size conditioning and token positions of its `position`."""
        args, kwargs = self.call
        kwargs = dict(kwargs)
        sample = pack(x_BChw) if self.packed else x_BChw.contiguous()
        if args:
            args = (sample, *args[1:])
        else:
            kwargs[next(name for name in SAMPLE_NAMES if name in kwargs)] = sample
        added = kwargs.get("added_cond_kwargs")
        if isinstance(added, Mapping) and isinstance(added.get("time_ids"), Tensor):
            kwargs["added_cond_kwargs"] = {**added, "time_ids": self._time_ids_for(added["time_ids"], position)}
        if self.packed:
            kwargs["img_ids"] = self._ids(kwargs["img_ids"], position)
        return args, kwargs

    def map_of(self, output: Any, size: tuple[int, int]) -> Tensor:
        """Return the first tensor of `output`, unpacked where the call is packed: [B, C, h, w], with `size` (h, w)."""
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        return unpack(first, size[0] // 2, size[1] // 2) if self.packed else first

    def output(self, like: Any, whole_BCHW: Tensor) -> Any:
        """Return the whole prediction in the structure of `like`, packed where the call is packed."""
        whole = pack(whole_BCHW) if self.packed else whole_BCHW
        if isinstance(like, Tensor):
            return whole
        if isinstance(like, tuple):
            return (whole, *like[1:])
        return with_tensors(like, [whole])

    def _time_ids_for(self, time_ids: Tensor, position: PatchPosition) -> Tensor:
        new_ids, whole = time_ids.clone(), self._in_pixels(tuple(self.x_BCHW.shape[-2:]))
        if new_ids.shape[-1] != 6:
            return new_ids  # an aesthetic score in place of the target size
        if self.size_conditioning == "whole":
            if position.corner is not None:
                new_ids[..., 2:4] += torch.tensor(self._in_pixels(position.corner)).to(new_ids)
            return new_ids
        own = torch.tensor(self._in_pixels(position.size)).to(new_ids)
        for first in (0, 4):  # sizes that the caller chose stay
            sizes = new_ids[..., first : first + 2]
            sizes[(sizes == torch.tensor(whole).to(new_ids)).all(-1)] = own
        return new_ids

    def _in_pixels(self, latents: Sequence[int]) -> tuple[int, int]:
        return latents[0] * self.pixels, latents[1] * self.pixels

    def _ids(self, img_ids: Tensor, position: PatchPosition) -> Tensor:
        rows, columns = position.size[0] // 2, position.size[1] // 2
        ids = torch.zeros(rows, columns, 3, dtype=img_ids.dtype, device=img_ids.device)
        ids[..., 1] = torch.arange(rows, device=img_ids.device)[:, None]
        ids[..., 2] = torch.arange(columns, device=img_ids.device)
        return ids.reshape(rows * columns, 3).expand(*img_ids.shape[:-2], -1, -1)


def pack(x_BCHW: Tensor) -> Tensor:
    """Return tokens of 2 x 2 latents in FLUX's layout: [B, H/2 * W/2, 4 * C]."""
    batch, channels, height, width = x_BCHW.shape
    cells = x_BCHW.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return cells.reshape(batch, height // 2 * (width // 2), 4 * channels)


def unpack(tokens_BND: Tensor, rows: int, columns: int) -> Tensor:
    """Return the latent of `rows` x `columns` tokens: [B, D / 4, 2 * rows, 2 * columns]."""
    batch, _, depth = tokens_BND.shape
    cells = tokens_BND.reshape(batch, rows, columns, depth // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(batch, depth // 4, 2 * rows, 2 * columns)


def refuse_whole(kwargs: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for arguments that refer to the whole image inside the denoiser."""
    refuse_arguments(kwargs, REFUSED | {"ip_adapter_masks": "a patch would use them as its own masks"})
    for name, value in kwargs.items():
        if "residual" in name and value is not None:
            raise UnsupportedModel(
                f"{name}: residuals of a ControlNet or an adapter are of the whole image, but structure guidance "
                "calls the denoiser for patches of it: use strategy exact"
            )


def _shape(sample: Any) -> str:
    return str(tuple(sample.shape)) if isinstance(sample, Tensor) else f"a {type(sample).__name__}"
