"""Convolution and padding over a band of rows.

Models pad in three ways: in the convolution itself, with a function before it (zeros, or copies of the edge), or with
both. Where a band ends inside the image, the neighbour's rows replace the padded ones. The bulk is convolved while
these are in flight; then the few rows that read them are computed again.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.exchange_part import Halo
from patchpar.errors import UnsupportedModel
from patchpar.plan.bands import Stencil
from patchpar.shard.unet.layers import (
    ConvolutionArguments,
    convolve_with_halo,
    copies_band,
    is_thin,
    mend_borders,
    stencil_of,
)
from patchpar.shard.unet.one_column import convolve_strided
from patchpar.shard.vae.band import NeighbourRows, VaeBand, moved


def convolve(band: VaeBand, function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return our rows of `function`, F.conv2d or F.conv3d. Raises UnsupportedModel, ExchangeError.

    input [B, C, ..., h, W], weight [K, C / groups, ..., s, t], bias [K]; the output has K channels.
    """
    y = _convolve(band, function, input, *args, **kwargs)
    if y.ndim == 5:
        band.frames = y.shape[2]
    return y


def _convolve(band: VaeBand, function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    conv = ConvolutionArguments.of(*args, **kwargs)
    if conv.kernel_size[band.dim] == 1:
        band.settle([input])
        return _plain(function, input, conv)
    beyond, own = band.beyond(input), stencil_of(conv, band.dim)
    if beyond is not None and any(beyond.padded):
        return _convolve_padded(band, function, input, conv, own)
    if not own.padding:  # all rows that it reads are there, or it makes fewer than it reads, which does not verify
        return _plain(function, input, conv)
    left = beyond is not None and max(own.before, own.after) == 1
    fetch = band.take(input).halo if left else band.fetch(input, own.before, own.after)  # type: ignore[union-attr]
    return _finish(band, function, (input, input), conv, own, fetch)


def _convolve_padded(
    band: VaeBand, function: Callable[..., Tensor], x: Tensor, conv: ConvolutionArguments, stencil: Stencil
) -> Tensor:
    """Convolve rows that a function before has padded."""
    beyond = band.take(x)
    assert beyond is not None
    before, after = beyond.padded
    if stencil.padding:
        raise UnsupportedModel(f"{band.where}: rows are padded twice")
    stencil = Stencil(extent=stencil.extent, stride=stencil.stride, padding=before)
    if stencil.after > after:
        raise UnsupportedModel(f"{band.where}: {after} rows are padded where {stencil.after} are read")
    own = x.narrow(band.dim, before, x.shape[band.dim] - before - after)

    def fetch() -> Halo:
        halo = beyond.halo()
        above = halo.before if before else None  # a norm brings a row of each side
        below = None if halo.after is None else halo.after.narrow(band.dim, 0, stencil.after)
        if _copies(band, conv, own, stencil):  # at an edge of the image the padded rows are read
            above = x.narrow(band.dim, 0, before) if above is None else above
            below = x.narrow(band.dim, x.shape[band.dim] - after, stencil.after) if below is None else below
        return Halo(above, below)

    return _finish(band, function, (x, own), conv, stencil, fetch)


def _finish(
    band: VaeBand,
    function: Callable[..., Tensor],
    xs: tuple[Tensor, Tensor],
    conv: ConvolutionArguments,
    stencil: Stencil,
    fetch: Callable[[], Halo],
) -> Tensor:
    """Convolve `xs`: our rows as the model passes them, and without its padding."""
    padded, own = xs
    if _copies(band, conv, own, stencil):
        return convolve_with_halo(conv, own, band.dim, stencil, fetch())
    y = _plain(function, padded, conv)
    return mend_borders(conv, own, y, band.dim, stencil, fetch())


def _copies(band: VaeBand, conv: ConvolutionArguments, own: Tensor, stencil: Stencil) -> bool:
    return is_thin(own.shape[band.dim], stencil) or copies_band(conv, own, has_halo=False)


def _plain(function: Callable[..., Tensor], x: Tensor, conv: ConvolutionArguments) -> Tensor:
    return convolve_strided(
        function, x, conv.weight, conv.bias, (conv.stride, conv.padding, conv.dilation), conv.groups
    )


def pad(band: VaeBand, input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Tensor:
    """Return F.pad of our rows: input [B, C, ..., h, W]. Raises UnsupportedModel, ExchangeError."""
    first = 2 * (-band.dim - 1)  # torch lists (before, after) from the last dim on
    before, after = (int(pad[first]), int(pad[first + 1])) if len(pad) > first + 1 else (0, 0)
    if min(before, after) < 0:
        raise UnsupportedModel(f"{band.where}: rows are cut off")
    beyond = band.beyond(input)
    across = [*pad[:first], 0, 0, *pad[first + 2 :]]
    if not (before or after):
        y = F.pad(input, list(pad), mode, value)
        if beyond is not None:
            band.leave(moved(beyond, y, lambda rows: F.pad(rows, across, mode, value)))
        return y
    if beyond is not None and max(before, after) == 1:
        band.take(input)
    else:
        beyond = NeighbourRows(weakref.ref(input), band.fetch(input, before, after))
    y = F.pad(input, list(pad), mode, value)
    found = moved(beyond, y, lambda rows: F.pad(rows, across, mode, value) if any(across) else rows)
    band.leave(found._replace(padded=(before, after), norm=""))
    return y
