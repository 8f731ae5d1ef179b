"""A call of a denoiser in bands that holds foreign code, and what runs it plainly for a comparison."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from patchpar.comm.pytree import with_own_lists
from patchpar.shard.foreign.cuts import band_cuts
from patchpar.shard.foreign.guarded_call import GuardedCall
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.unet.discover import ExchangeSites
from patchpar.shard.unet.spatial_arguments import map_of, with_sample_size
from patchpar.shard.verification import Call, Forward

WAY_OUT = "use plan cfg=2 or data=N, which do not split the image"


class BandComparison(NamedTuple):
    """Runs a call as `plain`, or with fresh values by `exactly`; `use_bands` sets the bands of a call's sample.

    `remembers`: the call itself may use values of earlier steps. `form`: what it has in common with others.
    """

    plain: Forward
    exactly: Forward
    use_bands: Callable[[Any], ExchangeSites]
    patch: LocalPatch
    call: Call
    remembers: bool
    form: Any

    def of(self, split: Callable[[], Any]) -> GuardedCall:
        """Return the call that `split` runs in bands."""
        kept = self._replace(call=with_own_lists(self.call))
        return GuardedCall(
            form=self.form,
            split=split,
            plain=partial(kept._run, self.plain),
            cuts=partial(band_cuts, self.patch),
            exactly=partial(kept._run, self.exactly) if self.remembers else None,
            smaller=kept._smaller,
            what=f"the denoiser split into {self.patch.axis.size} bands",
            mixed="positions",
            way_out=WAY_OUT,
        )

    def _run(self, forward: Forward) -> Any:
        args, kwargs = with_own_lists(self.call)
        return forward(*args, **kwargs)

    def _smaller(self) -> Iterator[GuardedCall]:
        """Yield such calls at half the size, at a quarter, and so on."""
        sites = self.use_bands(map_of(*self.call))
        for seed, size in enumerate(self._smaller_sizes(sites.total_stride)):
            call = with_sample_size(*self.call, size, seed=seed, beside=sites.beside)
            smaller = self._replace(call=call, remembers=False)
            yield smaller.of(partial(smaller._aside, map_of(*self.call)))

    def _aside(self, sample: Any) -> Any:
        """Return the output in bands; afterwards the bands are those of `sample` again."""
        try:
            return self._run(self.exactly)
        finally:
            self.use_bands(sample)

    def _smaller_sizes(self, unit: int) -> Iterator[tuple[int, int]]:
        height, width = map_of(*self.call).shape[-2:]
        least = unit * sum(self.patch.axis.ratio or (1,) * self.patch.axis.size)
        least_height, least_width = (least, unit) if self.patch.dim == -2 else (unit, least)
        while True:
            height, width = height // 2 // unit * unit, width // 2 // unit * unit
            if height < least_height or width < least_width:
                return
            yield height, width
