"""Modules that need the whole map, of which every rank holds a band: Fourier transforms, and pooling to a fixed size.

A transform over the split dim, as in FreeU's filter and similar ones: the bands are gathered, always fresh, and every
rank transforms the whole. All ranks change the spectrum alike; the output of the inverse transform is cut to the band
again. FreeU (arXiv:2309.11497) filters the skip connections of the two deepest stages, where maps are small.

Pooling: the output has the same size for every image and is the same on every rank, and so is all that is computed from
it: the image embedding of I2VGen-XL (arXiv:2311.04145) becomes context tokens that every pixel attends to.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchpar.plan.bands import Bands
from patchpar.shard.hooks import HookSet
from patchpar.shard.local_patch import LocalPatch, PatchHook

TRANSFORMS = frozenset(
    getattr(torch.fft, f"{kind}{name}") for kind in ("", "i", "r", "ir") for name in ("fft", "fft2", "fftn")
)
INVERSE = {torch.fft.ifft, torch.fft.ifft2, torch.fft.ifftn, torch.fft.irfft, torch.fft.irfft2, torch.fft.irfftn}
OF_ONE_DIM = {torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.irfft}  # the last dim by default
OF_TWO_DIMS = {torch.fft.fft2, torch.fft.ifft2, torch.fft.rfft2, torch.fft.irfft2}  # the last two by default
HALF = (torch.float16, torch.bfloat16)
MAP_DIMS = 4  # batch, channels, rows, columns; a video has frames too


class FourierHook(PatchHook):
    """A module whose forward has Fourier transforms: it runs unchanged, its transforms take the whole map."""

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


class PoolingHook(PatchHook):
    """A module without children whose output has one size for maps of all sizes."""

    def new_forward(self, module: nn.Module, x: Tensor) -> Any:
        """Replace the module's forward: gather `x` [B, C, ..., h, W] to the whole map; a vector is not gathered."""
        is_map = x.ndim >= MAP_DIMS  # the same module may be called with vectors, which every rank has whole
        whole = self.patch.whole_map("pooling", self.where, x) if self.patch.active and is_map else x
        return self.fn_ref.original_forward(whole)


class TransformsMode(TorchFunctionMode):
    """Notes the modules that call torch.fft: the innermost of those entered, or "" outside of all."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = [""]
        self.found: dict[str, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in TRANSFORMS:
            self.found[self._inside[-1]] = None
        return func(*args, **(kwargs or {}))

    def enter(self, path: str, *_: Any) -> None:
        """Begin the forward of the module at `path`."""
        self._inside.append(path)

    def leave(self, *_: Any) -> None:
        """End the innermost forward."""
        self._inside.pop()


def modules_with_transforms(denoiser: nn.Module, run: Callable[[], Any]) -> tuple[str, ...]:
    """Return the paths of the modules that call torch.fft in `run`, a call of the denoiser, by hooks on all modules."""
    with HookSet() as hooks, torch.no_grad(), TransformsMode() as seen:
        for path, module in denoiser.named_modules():
            hooks.before(module, partial(seen.enter, path))
            hooks.after(module, seen.leave)
        run()
    return tuple(path for path in seen.found if path)
