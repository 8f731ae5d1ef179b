"""Exchange points of group norms and convolutions, as diffusers hooks.

A hook replaces one module's forward and can be removed. Its `LocalPatch` has the exchange policy of the strategy, which
decides for each kind of exchange point whose values are used, and whether they are fresh or stale.

    norm      fresh: moments to all ranks and raw edge rows to the neighbours in one round; the neighbour's rows are
              stored raw for the convolution that the norm feeds, which normalises them
    conv      rows stored by that norm, if any, else from the neighbours; the bulk is convolved meanwhile

Values for the next step are sent as soon as they exist, several in one bucket, and awaited one step later.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from patchpar.comm.exchange_part import ExchangePart, Halo, MomentRows, moments_part, stacked_moments
from patchpar.comm.kernels.fused_op import SHAPES_KEPT, is_fused
from patchpar.comm.layouts import EdgeLayout
from patchpar.comm.transport import Work
from patchpar.plan.bands import Stencil
from patchpar.plan.exchange_policy import LEAST_VARIANCE
from patchpar.shard.kernels.group_moments import moments_of_band
from patchpar.shard.local_patch import LocalPatch, PatchHook
from patchpar.shard.stale.guidance_call import StaleEntry
from patchpar.shard.unet.layers import (
    Conv,
    RawHalo,
    convolve,
    convolve_with_halo,
    copies_band,
    is_thin,
    join_halo,
    mend_borders,
    normalise,
    stencil_of,
)
from patchpar.shard.unet.stale_halo import StaleRound, edges_to_send, of_neighbours


class NormHook(PatchHook):
    """Group norm of the whole image from the moments of each rank's band."""

    def __init__(self, patch: LocalPatch, where: str, feeds: "ConvFed | None") -> None:
        super().__init__(patch, where)
        self.feeds = feeds
        self._rounds: dict[tuple[object, ...], _EdgeRound] = {}

    def new_forward(self, module: nn.GroupNorm, x: Tensor) -> Tensor:
        """Replace GroupNorm.forward: normalise the band `x` [B, C, ..., h, W]. Raises ExchangeError, PlanError."""
        patch = self.patch
        if not patch.active:
            return self.fn_ref.original_forward(x)
        fused = is_fused(x)  # asked once: a kernel and a message depend on it
        own = moments_of_band(x, module.num_groups, fused=fused)
        entry = patch.entry(self.where, patch.policy.moments)
        if patch.fresh or patch.policy.moments == "fresh":
            return self._normalised_together(module, x, own, entry, fused=fused)
        return self._normalised_stale(module, x, own, entry)

    def _normalised_together(
        self, module: nn.GroupNorm, x: Tensor, own: Tensor, entry: StaleEntry | None, *, fused: bool
    ) -> Tensor:
        """Normalise with fresh moments of all ranks; fresh edge rows are exchanged in the same round."""
        patch = self.patch
        feeds = self.feeds if patch.fuses_edges else None
        if feeds is None:
            found = patch.comm.all_gather(patch.axis, "moments", self.where, own).wait()
            moments: MomentRows = found, ()
            halo = None
        else:
            moments, halo = self.gather_with_edges(x, own, feeds, fused=fused).wait()
        if entry is not None:
            # This rank's too, so that its own tensor is not held beside them.
            rows = stacked_moments(moments, own.shape[0]).unbind(0)
            entry.put({patch.axis.ranks[other]: [rows[other]] for other in patch.axis.others}, rows[patch.axis.rank])
        y, terms = normalise(module, x, moments)
        if feeds is not None and halo is not None:
            patch.halos.update(dict.fromkeys(feeds.convs, RawHalo(halo, terms, patch.dim, feeds.activations)))
        return y

    def gather_with_edges(
        self, x: Tensor, own: Tensor, feeds: "ConvFed", *, fused: bool
    ) -> Work[tuple[MomentRows, Halo]]:
        """Start to gather moments `own` [N] of all ranks, and the neighbours' edge rows beyond `x` [B, C, ..., h, W].

        What follows from the shape is computed, and checked, for the first band that has it. Raises PlanError,
        UnsupportedModel, ExchangeError.
        """
        patch, shape = self.patch, x.shape
        key = shape, x.dtype, patch.dim, patch.bands.starts
        known = self._rounds.get(key)
        if known is None:
            edges = patch.edges(x, feeds.before, feeds.after)
            layout = patch.comm.moments_layout(patch.axis, own, edges)
            if layout is None:
                return patch.comm.gather_moments(patch.axis, self.where, own, edges)
            if len(self._rounds) >= SHAPES_KEPT:
                self._rounds.clear()
            known = self._rounds[key] = _EdgeRound(layout, *patch.rows_sent(feeds.before, feeds.after))
        layout, first, last = known
        tensors = [own]
        if first:
            tensors.append(x.narrow(patch.dim, 0, first))
        if last:
            tensors.append(x.narrow(patch.dim, shape[patch.dim] - last, last))
        return patch.comm.repeat_moments(self.where, layout, tensors, fused=fused)

    def _normalised_stale(self, module: nn.GroupNorm, x: Tensor, own: Tensor, entry: StaleEntry | None) -> Tensor:
        """Normalise with this rank's fresh moments and the others' stale ones."""
        patch = self.patch
        if entry is None:  # separate: every band by itself
            return normalise(module, x, (own.unsqueeze(0), ()))[0]
        others = [values[0] for values in entry.wait().values()]
        before = entry.own
        assert before is not None
        # Before the message, whose memory is that of the last.
        moments = torch.stack([own if patch.policy.moments == "stale" else before, *others]), ()
        if patch.cache is not None and not patch.frozen:
            entry.own = own
            entry.pending = patch.cache.send(moments_part(patch.axis, [own]), self.where, entry)
        if patch.policy.moments == "stale":
            return normalise(module, x, moments, published=patch.policy.published)[0]
        least = LEAST_VARIANCE[patch.policy.moments]
        return normalise(module, x, moments, own, least=least, published=patch.policy.published)[0]


class _EdgeRound(NamedTuple):
    """What is the same in every round of a norm. `first` and `last`: how many of this rank's rows others read."""

    layout: EdgeLayout
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ConvFed:
    """The convolutions that a norm feeds through pointwise activations: paths, reach in rows, and those activations."""

    convs: tuple[str, ...]
    before: int
    after: int
    activations: tuple[nn.Module, ...]


class ConvHook(PatchHook):
    """A convolution with a kernel larger than one along the split dim.

    `trailing`: number of zero rows that the model itself appends before an unpadded convolution.
    """

    def __init__(self, patch: LocalPatch, where: str, *, reads_sample: bool, trailing: int) -> None:
        super().__init__(patch, where)
        self.reads_sample, self.trailing = reads_sample, trailing
        self._stencil: Stencil | None = None  # of the module, computed once
        self._rounds: dict[tuple[object, ...], StaleRound] = {}

    def new_forward(self, module: Conv, x: Tensor) -> Tensor:
        """Replace Conv2d.forward and Conv3d.forward: `x` [B, C, ..., h, W] and the output are this rank's band.

        Raises ExchangeError, PlanError, UnsupportedModel.
        """
        patch, dim = self.patch, self.patch.dim
        left = patch.halos.pop(self.where, None)
        if not patch.active:
            return self.fn_ref.original_forward(x)
        if self._stencil is None:
            self._stencil = stencil_of(module, dim)
        stencil = self._stencil
        own = x.narrow(dim, 0, x.shape[dim] - self.trailing) if self.trailing else x
        is_whole_here = self.reads_sample and patch.whole is not None
        entry = None if is_whole_here else patch.entry(self.where, patch.policy.halo)
        if entry is not None and not patch.fresh:
            return self._with_stale_halo(module, x, own, stencil, entry)
        if is_whole_here:
            halo: Halo | RawHalo | Callable[[], Halo] = _halo_of_whole(patch, own, stencil.before, stencil.after)
        else:
            halo = self._start(own, stencil, left, entry)
        if _joins(module, own, dim, stencil, has_halo=not callable(halo)):
            return convolve_with_halo(module, own, dim, stencil, halo() if callable(halo) else halo)
        y = self.fn_ref.original_forward(x)
        return mend_borders(module, own, y, dim, stencil, _ready(halo))

    def _start(
        self, x: Tensor, stencil: Stencil, left: RawHalo | None, entry: StaleEntry | None
    ) -> Halo | RawHalo | Callable[[], Halo]:
        """Return the halo if it is available; else start the exchange, and return a function that waits for it."""
        patch = self.patch

        def kept(halo: Halo) -> Halo:
            if entry is not None:
                entry.put({patch.axis.ranks[group_rank]: [rows] for group_rank, rows in _by_rank(patch, halo)})
            return halo

        if left is not None:
            return left if entry is None else kept(left.ready())
        edges = patch.edges(x, stencil.before, stencil.after)
        pending = patch.comm.gather_with_edges(patch.axis, self.where, [], edges)
        return lambda: kept(pending.wait()[1])

    def _with_stale_halo(self, module: Conv, x: Tensor, own: Tensor, stencil: Stencil, entry: StaleEntry) -> Tensor:
        """Convolve with the neighbours' stale rows, and send this rank's for the next step."""
        patch, dim = self.patch, self.patch.dim
        key = own.shape, own.dtype, dim, patch.bands.starts, patch.policy.published
        known = self._rounds.get(key)
        if known is None:
            if len(self._rounds) >= SHAPES_KEPT:
                self._rounds.clear()
            joins = _joins(module, own, dim, stencil, has_halo=True)
            known = self._rounds[key] = StaleRound.of(patch, own, stencil, joins=joins)
        halo = known.halo(entry.wait())
        sends = patch.cache is not None and not patch.frozen
        if not known.joins:
            kept = edges_to_send(patch, own, stencil).kept() if sends else None
            y = mend_borders(module, own, self.fn_ref.original_forward(x), dim, stencil, halo)
            if kept is not None:
                self._send(kept, stencil, entry)
            return y
        first, last = (known.first, known.last) if sends else (0, 0)
        joined, *copies = join_halo(own, dim, stencil, halo, first, last)
        if sends:
            self._send(known.part_of([rows for rows in copies if rows.shape[dim]]), stencil, entry)
        return convolve(module, joined, dim)

    def _send(self, edges: ExchangePart, stencil: Stencil, entry: StaleEntry) -> None:
        """Send this rank's edge rows for the next step; the stale ones have been read."""
        patch = self.patch
        assert patch.cache is not None
        wait = patch.cache.send(edges, self.where, entry)
        entry.pending = (lambda: of_neighbours(patch, wait(), stencil)) if patch.policy.published else wait


def _joins(conv: Conv, own: Tensor, dim: int, stencil: Stencil, *, has_halo: bool) -> bool:
    """Whether the band `own` [B, C, ..., h, W] is joined with its halo before it is convolved."""
    if is_thin(own.shape[dim], stencil):
        return True
    return stencil.before + stencil.after > 0 and copies_band(conv, own, has_halo=has_halo)


def _ready(halo: Halo | RawHalo | Callable[[], Halo]) -> Halo:
    if isinstance(halo, RawHalo):
        return halo.ready()
    return halo() if callable(halo) else halo


def _by_rank(patch: LocalPatch, halo: Halo) -> Iterator[tuple[int, Tensor]]:
    for group_rank, rows in ((patch.group_rank - 1, halo.before), (patch.group_rank + 1, halo.after)):
        if rows is not None:
            yield group_rank, rows


def _halo_of_whole(patch: LocalPatch, x: Tensor, before: int, after: int) -> Halo:
    """Return the halo of the first convolution from the whole latent, which every rank holds."""
    assert patch.whole is not None
    start, stop = patch.bands.starts[patch.group_rank], patch.bands.starts[patch.group_rank + 1]

    def rows(first: int, count: int) -> Tensor | None:
        if not count or first < 0 or first + count > patch.bands.total:
            return None
        shape = list(x.shape)
        shape[patch.dim] = count
        assert patch.whole is not None
        return patch.whole.narrow(patch.dim, first, count).reshape(shape)

    return Halo(rows(start - before, before), rows(stop, after))
