"""Which arguments of a denoiser call are maps of the picture, how large each is beside the latent, and other sizes."""

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
        """Its rows (or columns) where the latent has `rows`."""
        return -(-rows * self.enlarged // self.stride)


def map_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The sample of a denoiser call, if it is shaped as a picture: of at least four dims. Raises UnsupportedModel."""
    for value in (args[0] if args else None, *map(kwargs.get, SAMPLE_NAMES)):
        if isinstance(value, Tensor) and value.ndim >= 4:
            return value
    raise UnsupportedModel("this denoiser takes no picture-shaped latent, so it has no rows to split: use cfg or data")


def level_of(path: Any, x: Any, sample: Tensor, beside: Collection[str] = ()) -> MapScale | None:
    """How large an argument of a call is beside the sample, or None where it is no map of the picture.

    The sample, residuals (ControlNet, T2I-Adapters), and the arguments called `beside` are: other tensors may have such
    sizes by chance. `path` is the argument's in the pytree (args, kwargs). Raises UnsupportedModel.
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
            f"{sample.shape[-1]}"
        )
    return found


def as_large_as_the_latent(args: Any, kwargs: Any) -> tuple[str, ...]:
    """Arguments that may be maps of the picture beside the latent, by their size alone: such as a ControlNet's picture.

    A number of times as large as the latent on both sides, or smaller by a power of two.
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
    """The same call at another latent size: maps of the picture are replaced by noise, the rest stays.

    Lists and dicts are new ones, so that a denoiser that takes things out of them (T2I-Adapters' states) does not take
    them from the caller.
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
