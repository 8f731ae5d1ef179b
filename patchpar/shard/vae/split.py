"""One method of a VAE, encode or decode, in bands of rows: cut the input, run on a band, join the result."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.bands import split_bands
from patchpar.shard.compiled import compiled_in
from patchpar.shard.generator_states import GeneratorStates
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.precision import full_precision
from patchpar.shard.shared_noise import sampled_in_vain
from patchpar.shard.unsupported_model import is_of_the_split
from patchpar.shard.vae.band import VaeBand
from patchpar.shard.vae.functions import in_band
from patchpar.shard.vae.outputs import joined, on_all, on_first, tensors_of
from patchpar.shard.verification import (
    TOLERANCE,
    Comparison,
    fingerprint_of,
    relative_error,
    rounding_limit,
    verify_once,
)
from patchpar.shard.verification_cache import VerificationCache

PROBE = 64  # rows and columns of the image that shows the ratio of its size to the latent's, which is at most 32
FRAMES = {"decode": 3, "encode": 9}  # at most, in the comparison: enough for all dependences on earlier frames
COLUMNS = 3  # of a small latent, fewer than it has rows

Method = Callable[..., Any]


class VaeCall(NamedTuple):
    """A call of the VAE's own `method` with an image or latent `x` [B, C, ..., H, W]."""

    method: Method
    x: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, x: Tensor) -> Any:
        """Run the same call with another x [B, C, ..., h, W]."""
        return self.method(x, *self.args, **self.kwargs)


class SplitMethod:
    """`name` ("encode" or "decode") of a VAE on the ranks of an axis. Every rank passes the whole input.

    `feeds`: whether a group norm's edge rows are used, by its path, which the first call finds out. `exchanging` off
    computes every band alone, wrong on purpose, as the negative control of tests.
    """

    def __init__(self, vae: nn.Module, name: str, mesh: AxisComm, verifications: VerificationCache | None) -> None:
        self.vae, self.name, self.verifications = vae, name, verifications
        self.comm, self.axis = mesh
        self.exchanging = True
        self.error: float | None = None
        self._unit = 1 if name == "decode" else 0  # rows that a band is a multiple of; 0: not known yet
        self.feeds: dict[str, bool] = {}
        self._checked: set[Any] = set()
        self._deadline = self.comm.transport.deadline

    def takes(self, call: VaeCall) -> bool:
        """Whether an image has rows for every rank; if not, every rank runs it whole. Raises UnsupportedModel."""
        x = call.x
        if x.ndim not in (4, 5) or x.dtype not in TOLERANCE:
            return False
        rows, unit = x.shape[longer_dim(x)], self._rows_per_unit(call)
        return rows % unit == 0 and rows // unit >= self.axis.size

    def __call__(self, call: VaeCall, *, everywhere: bool) -> Any:
        """Return the method's output: whole on every rank if `everywhere`, else on the first, with zeros on the others.

        Raises UnsupportedModel or VerificationError for a VAE that cannot be split, ExchangeError.
        """
        self._check(call)
        start = time.perf_counter()
        output = self._in_bands(call, everywhere=everywhere)
        self.comm.traffic.note("vae", "", self.name, start)
        # A rank may wait for as long as another one computes, which is known only afterwards.
        transport, seconds = self.comm.transport, time.perf_counter() - start
        transport.deadline = max(transport.deadline, self._deadline + 2 * seconds)
        return output

    def forget(self) -> None:
        """Verify again at the next call, since the VAE's modules may have changed."""
        self._checked.clear()
        self.feeds.clear()

    def _rows_per_unit(self, call: VaeCall) -> int:
        """Return the image rows per latent row, measured by encoding a small corner."""
        if not self._unit:
            corner = call.x[:1, ..., :PROBE, :PROBE]
            corner = corner[:, :, :1] if corner.ndim == 5 else corner
            try:
                with random_numbers_kept(call):  # it may sample
                    latent = tensors_of(call.on(corner.contiguous()))[0]
            except Exception as error:
                if not is_of_the_split(error):
                    raise
                raise UnsupportedModel(
                    f"{type(self.vae).__name__}.{self.name} fails with an image of {PROBE} x {PROBE} pixels ({error})"
                ) from error
            self._unit = corner.shape[-1] // latent.shape[-1]
        return self._unit

    def _in_bands(self, call: VaeCall, *, everywhere: bool) -> Any:
        x, group_rank = call.x, self.axis.rank
        dim = longer_dim(x)
        bands = split_bands(x.shape[dim], self.axis.size, self._unit)
        patch = LocalPatch(self.comm, self.axis, bands=bands, dim=dim)
        band = VaeBand(patch, self.feeds, self.exchanging)
        own = x.narrow(dim, bands.starts[group_rank], bands.size(group_rank)).contiguous()
        with in_band(self.vae, band):
            output = call.on(own)
        return joined(output, partial(on_all if everywhere else on_first, band, self.name))

    # --- first use ----------------------------------------------------------------------------------------------

    def _check(self, call: VaeCall) -> None:
        """Compare with the plain method once for every signature of a call, unless there are no `verifications`."""
        form = (call.x.ndim, call.x.dtype, longer_dim(call.x), self._frames(call.x), tuple(sorted(call.kwargs)))
        if form in self._checked:
            return
        if compiled_in(self.vae):
            raise UnsupportedModel(f"{type(self.vae).__name__} has compiled blocks, and rows are exchanged inside them")
        if any(isinstance(x, Tensor) and x.ndim >= 4 for x in (*call.args, *call.kwargs.values())):
            raise UnsupportedModel(f"{type(self.vae).__name__}.{self.name} is called with a second image or latent")
        if self.verifications is not None:
            what = f"{type(self.vae).__name__}.{self.name} in {self.axis.size} bands"
            mesh, compare = (self.comm, self.axis), partial(self._compared, call)
            self.error = verify_once(self.verifications, self._facts(call, form), mesh, compare, what)
        self._checked.add(form)

    def _frames(self, x: Tensor) -> int:
        return min(x.shape[2], FRAMES[self.name]) if x.ndim == 5 else 0

    def _facts(self, call: VaeCall, form: Any) -> dict[str, Any]:
        """Return what the verification result depends on."""
        return {
            **fingerprint_of(self.vae),
            "method": self.name,
            "bands": self.axis.size,
            "form": [str(each) for each in form],
            "device": call.x.device.type,
        }

    def _compared(self, call: VaeCall) -> Iterator[list[Comparison]]:
        """Compare the method in bands with the plain one on this rank, at two sizes.

        With even bands all ranks do the same for any model; with uneven ones they might not, so these are last.
        """
        for seed, rows in enumerate((2 * self.axis.size, 2 * self.axis.size + 1)):
            small = call._replace(x=self._small(call.x, rows, seed))
            with full_precision():
                compared = Comparison(self._error(small), rounding_limit([call.x]))
            yield [compared]

    def _error(self, call: VaeCall) -> float:
        """Return the relative error of the bands against the plain method on this rank. Raises UnsupportedModel."""
        try:
            with random_numbers_kept(call):
                want = tensors_of(call.on(call.x))
            with random_numbers_kept(call):
                got = tensors_of(self._in_bands(call, everywhere=True))
        except UnsupportedModel:
            raise
        except Exception as error:
            if not (is_of_the_split(error) or isinstance(error, PlanError)):  # that of bands too thin for a convolution
                raise
            raise UnsupportedModel(
                f"{type(self.vae).__name__}.{self.name} does not run in bands at a small size ({error})"
            ) from error
        pairs = zip(got, want, strict=True)
        return max(relative_error(x, y) if x.shape == y.shape else math.inf for x, y in pairs)

    def _small(self, x: Tensor, rows: int, seed: int) -> Tensor:
        """Return noise of `rows` latent rows, otherwise like `x`."""
        shape = list(x.shape)
        if x.ndim == 5:
            shape[2] = self._frames(x)
        dim = longer_dim(x)
        shape[-2], shape[-1] = (COLUMNS * self._unit,) * 2
        shape[dim] = rows * self._unit
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(x.device, x.dtype)


def longer_dim(x: Tensor) -> int:
    """Return the dim along which x [B, C, ..., H, W] is split: its longer side, so that borders are short."""
    return -2 if x.shape[-2] >= x.shape[-1] else -1


@contextmanager
def random_numbers_kept(call: VaeCall) -> Iterator[None]:
    """Restore the default random state, and those of generators among the arguments, at the end."""
    states = GeneratorStates({**call.kwargs, "*": call.args}, call.x.device)
    try:
        with sampled_in_vain():
            yield
    finally:
        states.restore()
