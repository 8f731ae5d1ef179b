"""A network that conditions a denoiser, such as a ControlNet, in the denoiser's bands, in which its outputs stay.

Its exchange points are found, installed and verified as those of a denoiser. Each rank has its rows of the residuals,
and the denoiser takes these without a message. All exchanges are of this step, whatever the strategy, so that residuals
are those of one process.

A network that cannot be split so runs whole on every rank, and the log says why.
"""

import logging
import math
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from torch import Tensor

from patchpar.comm.pytree import map_leaves, tensors_in
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.shard.unet.banded_maps import left_in_bands
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.shard.unet.discover import ExchangeSites
from patchpar.shard.unet.install import compared_at_two_sizes
from patchpar.shard.unsupported_model import in_one_line
from patchpar.shard.verification import Comparison, kind_of_call, relative_error, rounding_limit
from patchpar.shard.verification_cache import NOWHERE, VerificationCache

log = logging.getLogger(__name__)


class BandedConditioner(PatchedDenoiser):
    """A network whose outputs are maps that a denoiser in bands takes. Its policy has no stale values."""

    _called: ClassVar[str] = "the network"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verifications is None and self.patch.comm.transport.device.type != "meta":
            self.verifications = VerificationCache(NOWHERE)  # it need not be split, so that it is compared in any case
        self._whole = set[Hashable]()  # calls that cannot be split: the sizes of tensors, and their kind

    def condition(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward`, the network's own, returns, with its maps in bands, or whole where it is not split.

        Raises ExchangeError.
        """
        self._make_sure()
        call = tuple(x.shape for x in tensors_in((args, kwargs))), kind_of_call((args, kwargs))
        if call not in self._whole:
            try:
                return self.denoise(forward, *args, **kwargs)
            except (PlanError, VerificationError) as error:
                self._run_whole(call, error)
        return forward(*args, **kwargs)

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a call with its maps in bands. Raises as that of a denoiser."""
        self.prepare(forward, *args, **kwargs)
        if self.foreign.is_needed and self.foreign.names:
            raise UnsupportedModel(f"{self.foreign.blamed} may do in any step what it did not in the first")
        return left_in_bands(self.patch, type(self.denoiser).__name__, self._in_step(forward, (args, kwargs)))

    def _run_whole(self, call: Hashable, error: Exception) -> None:
        self._whole.add(call)
        self.patch.halos.clear()
        if self.patch.axis.rank == 0:
            log.warning("%s runs whole on every rank: %s", type(self.denoiser).__name__, in_one_line(error))

    def _exactly(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of this rank's bands."""
        self.patch.fresh, self.patch.cache = True, None
        return self._in_bands(forward, *args, **kwargs)

    def _compared(self, call: tuple[Any, Any], sites: ExchangeSites, split: Any, plain: Any) -> Any:
        """Compare all outputs, of a call in which no factor is 0: a ControlNet may be inactive in the first step."""
        return compared_at_two_sizes(split, plain, map_leaves(_active, call), sites, self.patch, self._compared_maps)

    def _compared_maps(self, got: Any, want: Any) -> Comparison:
        """Return the largest error of all maps. Raises UnsupportedModel where all are zeros, which show nothing."""
        bands, whole = tensors_in(left_in_bands(self.patch, "verification", got)), tensors_in(want)
        if not any(bool(x.any()) for x in whole):
            raise UnsupportedModel("all that it returns is zeros, so that no comparison shows whether bands are right")
        return Comparison(max(map(_error, bands, whole)), rounding_limit(whole))

    def _unlearn(self) -> None:
        super()._unlearn()
        self._whole.clear()


def _active(leaf: Any) -> Any:
    return 1.0 if isinstance(leaf, float) and leaf == 0 else leaf


def _error(banded: Any, want: Tensor) -> float:
    got: Tensor = banded.whole()
    return relative_error(got, want) if got.shape == want.shape else math.inf
