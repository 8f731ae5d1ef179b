"""Where a denoiser needs values that other ranks own, as diffusers hooks: group norm and convolution.

A hook replaces one module's forward and can be taken out again. Whose values it uses, and of which step, is the
strategy's business: it hands each hook a `LocalPatch`, whose treatment says so for each kind of seam.

    norm      this step: moments to all, raw edge rows to the neighbours, in one round; the neighbour's rows are
              normalised here and left for the convolution that the norm feeds
    conv      rows from that norm if it left any, else from the neighbours; the bulk is convolved meanwhile

Values of the last step are sent as soon as they exist, several in one bucket, and awaited here one step later.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diffusers.hooks import ModelHook
from torch import Tensor, nn

from patchpar.comm.collectives import ExchangePart, Halo, Received, halo_of, moments_part
from patchpar.comm.transport import TensorSpec
from patchpar.plan.exchange_policy import LEAST_VARIANCE
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.stale.cache import StaleEntry
from patchpar.shard.unet.layers import (
    Conv,
    Moments,
    Normalise,
    as_published,
    convolve_with_halo,
    correct_moments,
    is_heavy,
    is_thin,
    mend_borders,
    merge_moments,
    moments_of,
    pack_moments,
    stencil_of,
    unpack_moments,
)


class NormHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Group norm of the whole picture from per-share moments."""

    def __init__(self, share: LocalPatch, where: str, feeds: "ConvFed | None") -> None:
        super().__init__()
        self.share, self.where, self.feeds = share, where, feeds

    def new_forward(self, module: nn.GroupNorm, x: Tensor) -> Tensor:
        """Replaces GroupNorm.forward."""
        share = self.share
        if not share.active:
            return self.fn_ref.original_forward(x)
        own, shape = pack_moments(moments_of(x, module.num_groups)), (x.shape[0], module.num_groups)
        slot = share.slot(self.where, share.treatment.moments)
        if share.fresh or share.treatment.moments == "fresh":
            return self._normalised_together(module, x, own, slot)
        return Normalise(module, self._estimate(own, slot, shape))(x)

    def _normalised_together(self, module: nn.GroupNorm, x: Tensor, own: Tensor, slot: StaleEntry | None) -> Tensor:
        """With this step's moments of all; the edge rows come in the same round where they are of this step too."""
        share = self.share
        feeds = self.feeds if share.fuses_edges else None
        edges = share.edges(x, feeds.before, feeds.after) if feeds is not None else None
        received, rows_beyond = share.door.gather_with_edges(share.axis, self.where, [own], edges).wait()
        if slot is not None:
            slot.keep({share.axis.ranks[place]: values for place, values in received.items()}, own)
        everyone = [own if place == share.place else received[place][0] for place in range(share.axis.size)]
        normalise = Normalise(module, merge_moments(everyone, (x.shape[0], module.num_groups)))
        if feeds is not None:
            halo = Halo(*(feeds.activate(normalise, rows) for rows in rows_beyond))
            share.halos.update(dict.fromkeys(feeds.convs, halo))
        return normalise(x)

    def _estimate(self, own: Tensor, slot: StaleEntry | None, shape: tuple[int, int]) -> Moments:
        """Moments of the whole from ours of this step and the others' of the last one."""
        now = unpack_moments(own, shape)
        if slot is None:  # separate: every share by itself
            return now
        share = self.share
        others = [values[0] for values in slot.collect().values()]
        before = slot.own
        assert before is not None
        if share.memory is not None and not share.frozen:
            slot.own = own
            slot.coming = share.memory.send(moments_part(share.axis, [own]), self.where)
        if share.treatment.moments == "stale":
            found = merge_moments([own, *others], shape)
        else:
            least = LEAST_VARIANCE[share.treatment.moments]
            found = correct_moments(merge_moments([before, *others], shape), unpack_moments(before, shape), now, least)
        return as_published(found, now.num) if share.treatment.published else found


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

    def __init__(self, share: LocalPatch, where: str, *, reads_sample: bool, trailing: int) -> None:
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
        halo = self._start(own, stencil.before, stencil.after, left)
        reads_beyond, is_here = stencil.before + stencil.after > 0, isinstance(halo, Halo)
        if is_thin(own.shape[dim], stencil) or (reads_beyond and is_here and is_heavy(module, own)):
            return convolve_with_halo(module, own, dim, stencil, _waited_for(halo))
        y = self.fn_ref.original_forward(x)
        return mend_borders(module, own, y, dim, stencil, _waited_for(halo))

    def _start(self, x: Tensor, before: int, after: int, left: Halo | None) -> Halo | Callable[[], Halo]:
        """The rows outside where they are here already; else start to get them, and return what waits for them."""
        share = self.share
        if self.reads_sample and share.whole is not None:
            return _halo_of_whole(share, x, before, after)
        slot = share.slot(self.where, share.treatment.halo)
        if slot is not None and not share.fresh:
            return self._of_last_step(x, before, after, slot)

        def kept(halo: Halo) -> Halo:
            if slot is not None:
                slot.keep({share.axis.ranks[place]: [rows] for place, rows in _by_place(share, halo)})
            return halo

        if left is not None:
            return kept(left)
        pending = share.door.gather_with_edges(share.axis, self.where, [], share.edges(x, before, after))
        return lambda: kept(pending.wait()[1])

    def _of_last_step(self, x: Tensor, before: int, after: int, slot: StaleEntry) -> Halo:
        """The neighbours' rows of the last step; ours leave for the next."""
        share = self.share
        edges, found = share.edges(x, before, after), slot.collect()
        halo = halo_of(share.axis, edges, found)
        if share.memory is not None and not share.frozen:
            if share.treatment.published:
                slot.coming = _send_to_everyone(share, x, before, after, self.where)
            else:
                slot.coming = share.memory.send(edges.kept(), self.where)
        return halo


def _waited_for(halo: Halo | Callable[[], Halo]) -> Halo:
    return halo if isinstance(halo, Halo) else halo()


def _send_to_everyone(share: LocalPatch, x: Tensor, before: int, after: int, where: str) -> Callable[[], Received]:
    """Edge rows as DistriFusion sends them: both to everyone. What comes back keeps the neighbours' only."""
    assert share.memory is not None
    axis, dim, reach = share.axis, share.dim, max(before, after)
    ranks = tuple(axis.ranks[place] for place in axis.others)
    both = (x.narrow(dim, 0, reach).clone(), x.narrow(dim, x.shape[dim] - reach, reach).clone())
    specs = tuple(TensorSpec.of(rows) for rows in both)
    come = share.memory.send(ExchangePart("halo", [(ranks, both)], dict.fromkeys(ranks, specs)), where)

    def received() -> Received:
        found, nearest = come(), {}
        if axis.rank > 0:
            rows = found[axis.ranks[axis.rank - 1]][1]
            nearest[axis.ranks[axis.rank - 1]] = [rows.narrow(dim, reach - before, before)]
        if axis.rank + 1 < axis.size:
            rows = found[axis.ranks[axis.rank + 1]][0]
            nearest[axis.ranks[axis.rank + 1]] = [rows.narrow(dim, 0, after)]
        return nearest

    return received


def _by_place(share: LocalPatch, halo: Halo) -> Iterator[tuple[int, Tensor]]:
    for place, rows in ((share.place - 1, halo.before), (share.place + 1, halo.after)):
        if rows is not None:
            yield place, rows


def _halo_of_whole(share: LocalPatch, x: Tensor, before: int, after: int) -> Halo:
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
