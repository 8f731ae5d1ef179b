"""Fourier transforms of a map of which every rank holds a band, as a diffusers hook: FreeU's filter and similar ones.

A transform over the split dim needs the whole map: the bands are gathered, always fresh, and every rank transforms the
whole. All ranks change the spectrum alike; the output of the inverse transform is cut to the band again.
FreeU (arXiv:2309.11497) filters the skip connections of the two deepest stages, where maps are small.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchpar.plan.bands import Bands
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.unet.transforms import TRANSFORMS

INVERSE = {torch.fft.ifft, torch.fft.ifft2, torch.fft.ifftn, torch.fft.irfft, torch.fft.irfft2, torch.fft.irfftn}
OF_ONE_DIM = {torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.irfft}  # the last dim by default
OF_TWO_DIMS = {torch.fft.fft2, torch.fft.ifft2, torch.fft.rfft2, torch.fft.irfft2}  # the last two by default
HALF = (torch.float16, torch.bfloat16)


class FourierHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """A module whose forward has Fourier transforms: it runs unchanged, its transforms take the whole map."""

    def __init__(self, patch: LocalPatch, where: str) -> None:
        super().__init__()
        self.patch, self.where = patch, where

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's forward."""
        if not self.patch.active:
            return self.fn_ref.original_forward(*args, **kwargs)
        with _WholeTransforms(self.patch, self.where):
            return self.fn_ref.original_forward(*args, **kwargs)


class _WholeTransforms(TorchFunctionMode):
    def __init__(self, patch: LocalPatch, where: str) -> None:
        super().__init__()
        self.patch, self.where = patch, where
        self.bands: Bands | None = None  # of the last transformed map

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in TRANSFORMS:
            return func(*args, **kwargs)
        x, *rest = args if args else (kwargs.pop("input"),)
        dim = self.patch.dim
        if x.ndim + dim not in _dims(func, x, rest, kwargs):
            return func(x, *rest, **kwargs)
        if func not in INVERSE:
            return func(self._whole(x), *rest, **kwargs)
        y = func(x, *rest, **kwargs)
        if self.bands is None or y.shape[dim] != self.bands.total:  # not the inverse of a transform in this module
            return y
        return y.narrow(dim, self.bands.starts[self.patch.group_rank], self.bands.size(self.patch.group_rank))

    def _whole(self, x: Tensor) -> Tensor:
        """All-gather the whole map from the bands. Raises UnsupportedModel, ExchangeError."""
        self.bands = self.patch.level(x.shape[self.patch.dim])
        whole = self.patch.whole_map("fourier", self.where, x)
        return whole.float() if whole.dtype in HALF else whole  # half precision only has sizes of powers of two


def _dims(func: Callable[..., Any], x: Tensor, rest: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Return the dims over which `func` transforms `x`, counted from the start."""
    given = kwargs.get("dim", rest[1] if len(rest) > 1 else None)
    if given is None:
        last = 1 if func in OF_ONE_DIM else 2 if func in OF_TWO_DIMS else x.ndim
        given = range(-last, 0)
    return {dim % x.ndim for dim in ([given] if isinstance(given, int) else given)}
