"""A denoiser whose calls are computed in bands: cut the input, run it with exchange points, join the prediction.

Common to all patch strategies; a strategy decides what its exchange points exchange and when.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_with_path

from patchpar.comm.collectives import AllGather
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.plan.bands import Bands, split_bands
from patchpar.plan.mesh import Axis
from patchpar.shard.compiled import refuse_wrapped, uncompiled
from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.group_offload import refuse_elsewhere
from patchpar.shard.stale.state import StaleState
from patchpar.shard.step_caches import refuse_caches
from patchpar.shard.unet.banded_maps import has_bands, with_own_bands
from patchpar.shard.unet.discover import ExchangeSites, discover
from patchpar.shard.unet.guard import WAY_OUT, BandComparison
from patchpar.shard.unet.install import UNetSharder, compared_at_two_sizes, compared_predictions, first_tensor
from patchpar.shard.unet.spatial_arguments import level_of, map_of, refuse_arguments
from patchpar.shard.verification import Comparison, call_signature, fingerprint_of, kind_of_call, verify_once

Kind = tuple[int, tuple[Hashable, ...]]
"""The dim along which a call is split, and its `kind_of_call`."""


@dataclass(eq=False, repr=False)
class PatchedDenoiser(SharedDenoiser):
    """A denoiser whose calls are computed in bands of rows or columns, as `split` says. See `SharedDenoiser`.

    Calls of another kind may run other modules, so that each kind is discovered and verified at its first call.
    """

    split: str = "auto"

    _learns: ClassVar[str] = "_learnt"
    _holds_for_all_plans: ClassVar[bool] = True
    _called: ClassVar[str] = "the denoiser"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._learnt: dict[tuple[Hashable, ...] | None, ExchangeSites] = {}  # by kind; None: of the first
        self._kind: Kind | None = None  # the split dim and the kind of call that is installed
        self._verified = set[Kind]()
        self._sites: ExchangeSites | None = None  # those that are installed
        self._sharded: UNetSharder | None = None
        self._gather = AllGather(*self.mesh, "prediction", "prediction")
        self._in_bands_before = frozenset[str]()  # paths of maps of this call of which only this rank's bands are here

    @property
    def sites(self) -> ExchangeSites | None:
        """Where ranks exchange in calls of the first kind; None if not known. If set before, not discovered."""
        return next(iter(self._learnt.values()), None)

    @sites.setter
    def sites(self, value: ExchangeSites | None) -> None:
        self._learnt = {} if value is None else {None: value}

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward`, the denoiser's own, returns for the whole image.

        Raises ExchangeError, PlanError, UnsupportedModel, VerificationError.
        """
        self.prepare(forward, *args, **kwargs)
        split = partial(self._in_step, forward, (args, kwargs))
        if not self.foreign.is_needed or self.exchange != "on":
            return split()
        plain, exactly = partial(self._plain, forward), partial(self.exactly, forward)
        form, remembers = call_signature((args, kwargs), self.ignored), self.history is not None
        found = BandComparison(plain, exactly, self._use_bands, self.patch, (args, kwargs), remembers, form)
        try:
            return self.foreign.run(found.of(split))
        except (VerificationError, UnsupportedModel):
            self.restore()  # or the next call would find exchange points, and go ahead
            raise

    def _in_step(self, forward: Callable[..., Any], call: tuple[Any, Any]) -> Any:
        try:
            if has_bands(call):
                beside = self._use_bands(map_of(*call)).beside
                call, self._in_bands_before = with_own_bands(call, self.patch, beside)
            if self.history is None:
                return self._steady(self._exact_kind, partial(self._exactly, forward), call)
            return self._with_stale_state(self.history, forward, *call[0], **call[1])
        finally:
            self.patch.active = False  # other calls of the denoiser's forward are plain ones
            self._in_bands_before = frozenset()

    def prepare(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Find where ranks have to exchange in such a call, and verify it, unless it is known. Raises as `denoise`."""
        refuse_arguments(kwargs)
        self._make_sure()
        kind = self._dim(map_of(args, kwargs)), kind_of_call((args, kwargs), self.ignored)
        try:
            if kind not in self._verified:
                self._install(forward, kind, (args, kwargs))
            elif kind != self._kind:
                self._put_in(kind)
        finally:
            self.patch.active = False

    def exactly(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole image of a call that is prepared, with fresh values at all exchange points.

        Raises ExchangeError, PlanError.
        """
        try:
            return self._exactly(forward, *args, **kwargs)
        finally:
            self.patch.active = False

    def _install(self, forward: Callable[..., Any], kind: Kind, call: tuple[Any, Any]) -> None:
        self._take_out()
        refuse_wrapped(self.denoiser)
        before = self._look()
        refuse_caches(self.denoiser, stale=self.history is not None)
        refuse_elsewhere(self.denoiser, self.patch.comm.transport.device)
        with self.foreign.set_aside(forward) as from_before:
            self._install_at(from_before, kind, call)
            self.watched.record(before)
        self._verified.add(kind)

    def _install_at(self, forward: Callable[..., Any], kind: Kind, call: tuple[Any, Any]) -> None:
        """Find the exchange points, install and verify them, by calls for their own sake."""
        sites = self._learnt.get(kind[1]) or self._learnt.pop(None, None)
        if sites is None:
            with uncompiled(self.denoiser):  # functions in compiled graphs cannot be intercepted
                sites = discover(self.denoiser, forward, *call)
        self._learnt[kind[1]] = sites
        self._put_in(kind)
        if self.verifications is not None:
            self.error = self._checked(partial(self._compared, call, sites), forward, self._facts(sites, call))

    def _compared(self, call: tuple[Any, Any], sites: ExchangeSites, split: Any, plain: Any) -> Any:
        return compared_at_two_sizes(split, plain, call, sites, self.patch, compared_predictions)

    def _put_in(self, kind: Kind) -> None:
        """Install the exchange points of a kind of call, if others are installed or none."""
        if kind == self._kind:
            return
        dim, sites = kind[0], self._learnt[kind[1]]
        if self._sharded is None or self.patch.dim != dim or self._sites != sites:
            self._take_out()
            self.patch.dim, self._sites = dim, sites
            self.patch.kv_sizes = dict(zip(sites.attentions, sites.kv_sizes, strict=True))
            self._sharded = UNetSharder(self.denoiser, sites, self.patch)
        self._kind = kind

    def _checked(
        self, compare: Callable[..., Iterable[list[Comparison]]], forward: Callable[..., Any], facts: dict[str, Any]
    ) -> float:
        """Return the error known for these facts, or measured now. Raises VerificationError, UnsupportedModel."""
        assert self.verifications is not None
        compare = partial(compare, partial(self._exactly, forward), partial(self._plain, forward))
        what = f"{self._called} split into {self.patch.axis.size} bands"
        way_out = f". {self.foreign.suspected} mixes positions in a way patchpar does not know: {WAY_OUT}"
        try:
            return verify_once(self.verifications, facts, self.mesh, compare, what, way_out)
        except BaseException:
            self.restore()  # or the next call would find exchange points, and go ahead
            raise

    def _facts(self, sites: ExchangeSites, call: tuple[Any, Any]) -> dict[str, Any]:
        """Return the facts that the verification result depends on."""
        sample = map_of(*call)
        return {
            **fingerprint_of(self.denoiser),
            "modules": sites.describe(),
            "strategy": self.patch.policy.name,
            "bands": self.patch.axis.ratio or self.patch.axis.size,
            "dim": self.patch.dim,
            "dtype": str(sample.dtype),
            "device": sample.device.type,
            "arguments": [str(kind) for kind in kind_of_call(call, self.ignored)],
        }

    def _plain(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.patch.active = False
        return forward(*args, **kwargs)

    def _exactly(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run with fresh values at every exchange point."""
        self.patch.fresh, self.patch.cache = True, None
        whole, _ = self._join(self._in_bands(forward, *args, **kwargs))
        return whole

    def _with_stale_state(self, history: StaleState, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run with stale values where the previous step is known and the policy uses them."""
        patch, sample = self.patch, map_of(args, kwargs)
        self._look_back(history, (sample.shape, sample.dtype, patch.dim, self._sites), (args, kwargs))
        patch.policy = history.policy.frozen() if patch.frozen else history.policy
        step = partial(self._stale_step, history, forward)
        whole, gathered = self._steady(history.steady_kind, step, (args, kwargs))
        history.receive(gathered, fresh=patch.fresh)
        return whole

    def _stale_step(self, history: StaleState, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the whole prediction, and what all ranks report: all of a step that depends on its arguments alone."""
        output = self._in_bands(forward, *args, **kwargs)
        # The prediction is awaited now, the rest of the bucket a step later: so the prediction is sent first.
        report = history.report((self.patch.axis.size - 1) * first_tensor(output).nbytes)
        return self._join(output, report, meanwhile=history.cache.end)

    def _in_bands(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        patch, sample = self.patch, map_of(args, kwargs)
        beside = self._use_bands(sample).beside
        patch.whole, patch.active = sample, self.exchange != "off"
        own_args, own_kwargs = tree_map_with_path(partial(self._cut, sample, beside), (args, kwargs))
        assert self._sharded is not None, "exchange points are installed before"
        return self._sharded.run(forward, own_args, own_kwargs)

    def _use_bands(self, sample: Tensor) -> ExchangeSites:
        """Set the bands of a call with that sample [B, C, H, W] or [B, C, F, H, W]; return where ranks exchange."""
        assert self._sites is not None
        self.patch.bands = bands_of(sample.shape[self.patch.dim], self.patch.axis, self._sites.total_stride)
        return self._sites

    def _cut(self, sample: Tensor, beside: Collection[str], path: Any, x: Any) -> Any:
        if self._in_bands_before and keystr(path) in self._in_bands_before:
            return x
        level, patch = level_of(path, x, sample, beside), self.patch
        if level is None:
            return x
        bands = patch.level(level.of(patch.bands.size(patch.group_rank)))
        return x.narrow(patch.dim, bands.starts[patch.group_rank], bands.size(patch.group_rank)).contiguous()

    def _join(
        self, output: Any, gathered: Sequence[Tensor] = (), meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[Any, list[list[Tensor]]]:
        """Return the whole prediction, and what all ranks sent as `gathered`; run `meanwhile` during the exchange."""
        own, dim = first_tensor(output), self.patch.dim
        bands, shape = self.patch.level(own.shape[dim]), list(own.shape)

        def specs(group_rank: int) -> list[TensorSpec]:
            shape[dim] = bands.size(group_rank)
            return [TensorSpec(tuple(shape), own.dtype), *map(TensorSpec.of, gathered)]

        gathering = self._gather.start([own, *gathered], specs)
        meanwhile()
        received = gathering.wait()
        whole = torch.cat([tensors[0] for tensors in received], dim)
        beside = [tensors[1:] for tensors in received]
        if isinstance(output, Tensor):
            return whole, beside
        if isinstance(output, tuple):
            return (whole, *output[1:]), beside
        first = next(iter(output))
        return type(output)(**{**output, first: whole}), beside

    def _dim(self, sample: Tensor) -> int:
        by_rows = self.split == "rows" or (self.split == "auto" and sample.shape[-2] >= sample.shape[-1])
        return -2 if by_rows else -1

    def _unlearn(self) -> None:
        self._learnt = {}

    def restore(self) -> None:
        """Remove the exchange points. Idempotent."""
        self._drop_graphs()
        self._take_out()
        self._verified.clear()
        if self.history is not None:
            self.history.cache.forget_forms()

    def _take_out(self) -> None:
        """Remove the exchange points for others: graphs of calls with those stay."""
        self._kind = None
        if self._sharded is not None:
            self._sharded.restore()
            self._sharded = None


def bands_of(total: int, axis: Axis, unit: int) -> Bands:
    """Return the bands of `total` latent rows in units of `unit` rows. Raises PlanError."""
    try:
        return split_bands(total, axis.size, unit, axis.ratio)
    except ValueError as error:
        raise PlanError(f"{error}: use at most {max(1, total // unit)} on axis 'patch', or a larger image") from error
