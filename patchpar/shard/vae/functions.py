"""The torch functions of a VAE that read beyond a band of rows, and their replacements.

    conv2d, conv3d, pad             convolution.py
    group_norm, activations         norms.py
    scaled_dot_product_attention    attention.py
    randn                           noise of the whole image, cut to our rows
    division by 1                   no copy

All else is local: upsampling by integral factors, norms over channels, pixel shuffles, caches of earlier frames.
Anything that is not is found when the VAE is compared with its plain run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import named_modules_of
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.vae.attention import attend
from patchpar.shard.vae.band import VaeBand
from patchpar.shard.vae.convolution import convolve, pad
from patchpar.shard.vae.norms import POINTWISE, group_norm, pointwise

Answer = Callable[..., Tensor]


def _with_function(answer: Answer, function: Callable[..., Any]) -> Answer:
    return lambda band, *args, **kwargs: answer(band, function, *args, **kwargs)


def _divide(band: VaeBand, function: Callable[..., Tensor], x: Any, divisor: Any, **kwargs: Any) -> Tensor:
    """Skip a division by 1: residual blocks divide by a scale that is nearly always 1, a copy of the largest maps."""
    same = isinstance(divisor, (int, float)) and divisor == 1 and isinstance(x, Tensor) and x.is_floating_point()
    return x if same and not kwargs else function(x, divisor, **kwargs)


def _noise(band: VaeBand, *size: Any, **kwargs: Any) -> Tensor:
    """Sample noise for the whole image on every rank, so that it does not depend on the number of ranks."""
    shape = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    if len(shape) < 2 or not band.fits(shape[band.dim]):
        return torch.randn(shape, **kwargs)
    own = shape[band.dim]
    shape[band.dim] = band.whole(own)
    return torch.randn(shape, **kwargs).narrow(band.dim, band.before(own), own)


CONVOLUTIONS = (F.conv2d, F.conv3d)
ANSWERS: dict[Callable[..., Any], Answer] = {
    **{function: _with_function(convolve, function) for function in CONVOLUTIONS},
    **{function: _with_function(pointwise, function) for function in POINTWISE},
    **{function: _with_function(_divide, function) for function in (Tensor.__truediv__, Tensor.div, torch.div)},
    F.pad: pad,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: lambda band, *args, **kwargs: attend(band, AttentionCall(*args, **kwargs)),
    torch.randn: _noise,
}


class BandFunctions(TorchFunctionMode):
    """A mode in which torch functions of this thread work on our band of the rows."""

    def __init__(self, band: VaeBand) -> None:
        super().__init__()
        self.band = band

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        answer, kwargs = ANSWERS.get(func), kwargs or {}
        if func not in CONVOLUTIONS and getattr(func, "__name__", "") != "__get__":  # shapes may be looked at
            self.band.settle((*args, *kwargs.values()))
        return func(*args, **kwargs) if answer is None else answer(self.band, *args, **kwargs)


@contextmanager
def in_band(vae: nn.Module, band: VaeBand) -> Iterator[None]:
    """Run the VAE on a band while open."""
    with HookSet() as hooks:
        for path, module in named_modules_of(vae):
            if path:
                hooks.before(module, partial(_enter, band, path))
        hooks.callback(band.finish)
        with BandFunctions(band):
            yield


def _enter(band: VaeBand, path: str, module: nn.Module, args: Any) -> None:
    band.where = path
