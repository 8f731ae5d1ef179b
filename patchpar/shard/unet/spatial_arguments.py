"""Arguments of a denoiser call that are maps of the image, their sizes relative to the latent, calls at other sizes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from patchpar.errors import UnsupportedModel
from patchpar.shard.batch import SAMPLE_NAMES


class MapScale(NamedTuple):
    """A map beside the latent: `enlarged` times as large, or smaller by `stride`, rounded up."""

    enlarged: int = 1
    stride: int = 1

    def of(self, rows: int) -> int:
        """Return its rows (or columns) where the latent has `rows`."""
        return -(-rows * self.enlarged // self.stride)


def map_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the sample of a denoiser call, [B, C, H, W] or [B, C, F, H, W]. Raises UnsupportedModel."""
    for value in (args[0] if args else None, *map(kwargs.get, SAMPLE_NAMES)):
        if isinstance(value, Tensor) and value.ndim >= 4:
            return value
    raise UnsupportedModel("this denoiser takes no image-shaped latent, so it has no rows to split: use cfg or data")


def level_of(path: Any, x: Any, sample: Tensor, beside: Collection[str] = ()) -> MapScale | None:
    """Return the size of an argument relative to `sample` [B, C, H, W] or [B, C, F, H, W]; None if it is no map.

    Maps are the sample, residuals (ControlNet, T2I-Adapters), and the arguments at the paths `beside`: other tensors
    may have such sizes by chance. `path` is that of `x` in the pytree (args, kwargs). Raises UnsupportedModel.
    """
    if not isinstance(x, Tensor) or x.ndim < 4:
        return None
    if x is sample:
        return MapScale()
    if "residual" not in "".join(str(key) for key in path) and keystr(path) not in beside:
        return None
    found = _level(x, sample)
    if found is None:
        raise UnsupportedModel(
            f"a residual of {tuple(x.shape[-2:])} rows and columns fits no level of a latent of {sample.shape[-2]} x "
            f"{sample.shape[-1]}: use plan cfg=2 or data=N"
        )
    return found


def as_large_as_the_latent(args: Any, kwargs: Any) -> tuple[str, ...]:
    """Return paths of arguments that may be maps of the image by their size alone, such as a ControlNet's image.

    They are an integer times as large as the latent on both sides, or smaller by a power of two.
    """
    sample = map_of(args, kwargs)
    leaves, _ = tree_flatten_with_path((tuple(args), dict(kwargs)))
    return tuple(
        keystr(path)
        for path, x in leaves
        if isinstance(x, Tensor)
        and x.ndim >= 4
        and x is not sample
        and "residual" not in keystr(path)
        and _level(x, sample)
    )


def _level(x: Tensor, sample: Tensor) -> MapScale | None:
    height, width = sample.shape[-2:]
    if x.shape[-2] >= height and x.shape[-2] % height == 0 and x.shape[-1] * height == x.shape[-2] * width:
        return MapScale(enlarged=x.shape[-2] // height)
    stride = 2
    while stride <= max(height, width):
        level = MapScale(stride=stride)
        if tuple(x.shape[-2:]) == (level.of(height), level.of(width)):
            return level
        stride *= 2
    return None


def with_sample_size(
    args: Any, kwargs: Any, size: tuple[int, int], *, seed: int = 0, beside: Collection[str] = ()
) -> tuple[Any, Any]:
    """Return the call at another latent size: maps of the image are replaced by noise, other arguments are unchanged.

    Lists and dicts are new ones, since a denoiser may remove their items (T2I-Adapters' states).
    """
    sample = map_of(args, kwargs)
    generator = torch.Generator().manual_seed(seed)

    def resized(path: Any, x: Any) -> Any:
        level = level_of(path, x, sample, beside)
        if level is None:
            return x
        shape = (*x.shape[:-2], *map(level.of, size))
        return torch.randn(shape, generator=generator).to(x.device, x.dtype)

    new_args, new_kwargs = tree_map_with_path(resized, (tuple(args), dict(kwargs)))
    return new_args, new_kwargs


REFUSED = {
    "gligen": "GLIGEN boxes are positions in the whole image",
}


def refuse_arguments(kwargs: Any, refused: Mapping[str, str] = REFUSED) -> None:
    """Raise UnsupportedModel for arguments that address the whole image inside a layer; `refused`: reasons by name."""
    for name in kwargs.get("cross_attention_kwargs") or {}:
        if name in refused:
            raise UnsupportedModel(
                f"{name} cannot be used with axis 'patch' ({refused[name]}): use plan cfg=2 or data=N"
            )
