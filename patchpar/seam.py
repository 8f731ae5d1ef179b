"""Where a denoiser needs values that other ranks own: convolution, group norm and self-attention, as diffusers hooks.

A hook replaces one module's forward and can be taken out again. What it exchanges, and when, is the strategy's
business: it hands each hook a `Share` (who and where we are) and the hook asks for this step's values.

    norm      moments to all, raw edge rows to the neighbours, in one round; the neighbour's rows are normalised
              here and left for the convolution that the norm feeds
    conv      rows from that norm if it left any, else from the neighbours; the bulk is convolved meanwhile
    attention own queries against our own keys while the others' come
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffusers.hooks import ModelHook
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.exchange import Door, Gather, HaloSpecs, Round
from patchpar.layers import (
    Conv,
    Halo,
    Normalise,
    attend,
    convolve_with_halo,
    is_thin,
    mend_borders,
    merge_moments,
    merge_partials,
    moments_of,
    pack_moments,
    stencil_of,
)
from patchpar.mesh import Axis
from patchpar.patches import Bands
from patchpar.transport import Spec


@dataclass(slots=True)
class Share:
    """This rank's share of the denoiser call under way. Everything but `door` and `axis` changes with the input.

    `dim` is -2 for bands of rows, -1 for bands of columns. While `active` is off every hook is the plain layer.
    """

    door: Door
    axis: Axis
    bands: Bands = field(default_factory=lambda: Bands((0,)))
    dim: int = -2
    whole: Tensor | None = None
    active: bool = True
    halos: dict[str, Halo] = field(default_factory=dict)  # left by a norm for the convolution it feeds

    @property
    def place(self) -> int:
        """Which band is ours."""
        return self.axis.rank

    def level(self, own_rows: int) -> Bands:
        """The bands on a map of which we hold `own_rows`. Raises UnsupportedModel."""
        try:
            return self.bands.at_level(self.place, own_rows, self.bands.total)
        except ValueError as error:
            raise UnsupportedModel(f"{error}: this denoiser cannot be split, use plan cfg=2 or data=N") from error

    def edges(self, x: Tensor, before: int, after: int) -> tuple[Tensor | None, Tensor | None, HaloSpecs]:
        """Rows to send to the places before and after, and what comes back, for a reach of `before` and `after`."""
        size, shape = x.shape[self.dim], list(x.shape)
        reach = max(before, after)
        if reach > 1:  # every band has a row
            self._refuse_thin(size, reach)

        def spec(rows: int) -> Spec | None:
            shape[self.dim] = rows
            return Spec(tuple(shape), x.dtype) if rows else None

        up, down = self.place > 0, self.place + 1 < len(self.bands)
        first = x.narrow(self.dim, 0, after) if up and after else None
        last = x.narrow(self.dim, size - before, before) if down and before else None
        return first, last, HaloSpecs(spec(before) if up else None, spec(after) if down else None)

    def _refuse_thin(self, own_rows: int, reach: int) -> None:
        """All ranks look at all bands, so that all refuse together."""
        bands = self.level(own_rows)
        thinnest = min(bands.size(place) for place in range(len(bands)))
        if reach > thinnest:
            raise PlanError(
                f"a convolution reads {reach} rows of its neighbours, but a band has only {thinnest} there: use fewer "
                f"than {len(bands)} ranks on axis 'patch', or a larger picture"
            )


class NormHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Group norm of the whole picture from per-share moments."""

    def __init__(self, share: Share, where: str, feeds: "ConvFed | None") -> None:
        super().__init__()
        self.share, self.where, self.feeds = share, where, feeds

    def new_forward(self, module: nn.GroupNorm, x: Tensor) -> Tensor:
        """Replaces GroupNorm.forward."""
        share = self.share
        if not share.active:
            return self.fn_ref.original_forward(x)
        own = moments_of(x, module.num_groups)
        packed = pack_moments(own)
        first, last, specs = None, None, HaloSpecs()
        if self.feeds is not None:
            first, last, specs = share.edges(x, self.feeds.before, self.feeds.after)
        kind = "moments" if self.feeds is None else "moments+halo"
        pending = Round(share.door, share.axis, kind, self.where).start([packed], first, last, specs)
        received, before, after = pending.wait()
        everyone = [packed if place == share.place else received[place][0] for place in range(share.axis.size)]
        shape = (x.shape[0], module.num_groups)
        normalise = Normalise(module, merge_moments(everyone, shape))
        if self.feeds is not None:
            halo = Halo(*(self.feeds.activate(normalise, rows) for rows in (before, after)))
            share.halos.update(dict.fromkeys(self.feeds.convs, halo))
        return normalise(x)


@dataclass(frozen=True, slots=True)
class ConvFed:
    """The convolutions a norm feeds through pointwise activations: paths, reach, and those activations."""

    convs: tuple[str, ...]
    before: int
    after: int
    activations: tuple[nn.Module, ...]

    def activate(self, normalise: Normalise, rows: Tensor | None) -> Tensor | None:
        """A neighbour's raw rows as the convolution would see them."""
        if rows is None:
            return None
        rows = normalise(rows)
        for activation in self.activations:
            rows = activation(rows)
        return rows


class ConvHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """A convolution with a kernel larger than one along the split dim.

    `trailing` counts zero rows that the model itself has padded on at the end before an unpadded convolution.
    """

    def __init__(self, share: Share, where: str, *, reads_sample: bool, trailing: int) -> None:
        super().__init__()
        self.share, self.where, self.reads_sample, self.trailing = share, where, reads_sample, trailing

    def new_forward(self, module: Conv, x: Tensor) -> Tensor:
        """Replaces Conv2d.forward and Conv3d.forward."""
        share, dim = self.share, self.share.dim
        left = share.halos.pop(self.where, None)
        if not share.active:
            return self.fn_ref.original_forward(x)
        stencil = stencil_of(module, dim)
        own = x.narrow(dim, 0, x.shape[dim] - self.trailing)
        fetch = self._start(own, stencil.before, stencil.after) if left is None else (lambda: left)
        if is_thin(own.shape[dim], stencil):
            return convolve_with_halo(module, own, dim, stencil, fetch())
        y = self.fn_ref.original_forward(x)
        return mend_borders(module, own, y, dim, stencil, fetch())

    def _start(self, x: Tensor, before: int, after: int) -> Callable[[], Halo]:
        share = self.share
        if self.reads_sample and share.whole is not None:
            halo = _halo_of_whole(share, x, before, after)
            return lambda: halo
        first, last, specs = share.edges(x, before, after)
        pending = Round(share.door, share.axis, "halo", self.where).start([], first, last, specs)
        return lambda: Halo(*pending.wait()[1:])


def _halo_of_whole(share: Share, x: Tensor, before: int, after: int) -> Halo:
    """Every rank holds the whole latent, so its first convolution needs nobody."""
    assert share.whole is not None
    start, stop = share.bands.starts[share.place], share.bands.starts[share.place + 1]

    def rows(first: int, count: int) -> Tensor | None:
        if not count or first < 0 or first + count > share.bands.total:
            return None
        shape = list(x.shape)
        shape[share.dim] = count
        assert share.whole is not None
        return share.whole.narrow(share.dim, first, count).reshape(shape)

    return Halo(rows(start - before, before), rows(stop, after))


class AttentionHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Self-attention over the tokens of the whole picture: the processor runs as it is, its attention call does not."""

    def __init__(self, share: Share, where: str) -> None:
        super().__init__()
        self.share, self.where = share, where

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces Attention.forward."""
        if not self.share.active:
            return self.fn_ref.original_forward(*args, **kwargs)
        with _AttentionOverShares(self.share, self.where) as mode:
            result = self.fn_ref.original_forward(*args, **kwargs)
        if mode.calls == 0:
            processor = type(getattr(module, "processor", module)).__name__
            raise UnsupportedModel(
                f"{self.where}: the attention processor {processor} does not call scaled_dot_product_attention, so its "
                "keys cannot be shared. Use the default processor: pipe.unet.set_default_attn_processor()"
            )
        return result


class _AttentionOverShares(TorchFunctionMode):
    def __init__(self, share: Share, where: str) -> None:
        super().__init__()
        self.share, self.where, self.calls = share, where, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return attend_over_shares(self.share, self.where, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend_over_shares(  # noqa: PLR0913 - the signature is torch's
    share: Share,
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Own queries against everybody's keys: ours while the others' travel, merged by log-sum-exp."""
    if attn_mask is not None or is_causal or dropout_p or enable_gqa:
        raise UnsupportedModel(
            f"{where}: spatial self-attention with a mask, causality or dropout cannot be split: use cfg=2 or data=N"
        )
    own = [key.transpose(1, 2), value.transpose(1, 2)]  # [B, l, N, D], as the projections lie in memory
    batch, tokens, heads = own[0].shape[:3]
    sizes = _tokens_per_place(share, tokens)

    def specs(place: int) -> list[Spec]:
        return [Spec((batch, sizes[place], heads, x.shape[-1]), x.dtype) for x in own]

    pending = Gather(share.door, share.axis, "kv", where).start(own, specs)

    def partials() -> "Any":
        yield attend(query, key, value, scale)
        for _, (k, v) in pending.others():
            yield attend(query, k.transpose(1, 2), v.transpose(1, 2), scale)

    return merge_partials(partials())


def _tokens_per_place(share: Share, own_tokens: int) -> list[int]:
    """Tokens of every place, given ours: a share of l = h * w tokens of a map that is w wide."""
    assert share.whole is not None
    own, across = share.bands.size(share.place), share.whole.shape[-1 if share.dim == -2 else -2]
    stride = 1
    while stride <= max(own, across):
        rows, columns = -(-own // stride), -(-across // stride)
        if own_tokens == rows * columns:
            bands = share.level(rows)
            return [bands.size(place) * columns for place in range(len(bands))]
        stride *= 2
    raise UnsupportedModel(
        f"{own_tokens} tokens of this rank fit no level of a band of {own} rows, {across} across: this attention "
        "cannot be split, use plan cfg=2 or data=N"
    )
