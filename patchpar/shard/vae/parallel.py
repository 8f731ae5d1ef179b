"""Install the parallel encode and decode in the VAEs of a pipeline, and remove them again.

vae.decode(latents)  ->  every rank its band of rows; the image on the first
vae.encode(image)    ->  every rank its band of rows; the latent on all
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.shard.hooks import HookSet
from patchpar.shard.shared_noise import sampled_on_one_rank
from patchpar.shard.unsupported_model import is_of_the_split
from patchpar.shard.vae.outputs import joined
from patchpar.shard.vae.split import SplitMethod, VaeCall, random_numbers_kept
from patchpar.shard.verification_cache import VerificationCache

METHODS = ("encode", "decode")
log = logging.getLogger(__name__)
CORNER = 4  # rows and columns of a latent


class OutputNeeded(Exception):
    """The pipeline uses the decoded image, so every rank needs it: run the call again with `everywhere`."""


@dataclass(slots=True)
class VaeCallState:
    """`running`: inside a call, where all ranks do the same. `everywhere`: all ranks get decoded images.

    `dropped`: an image has been decoded in this call, and only the first rank has it.
    """

    running: bool = False
    everywhere: bool = False
    dropped: bool = False

    @contextmanager
    def open(self, *, watched: bool = False) -> Iterator[None]:
        """Run one call of the pipeline. One `watched` by a callback cannot be repeated: all ranks get its images."""
        known, self.everywhere = self.everywhere, self.everywhere or watched
        self.running, self.dropped = True, False
        try:
            yield
        finally:
            self.running, self.everywhere = False, known

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Run a function of the caller, on one rank alone."""
        running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = running

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Decode an image for others than the pipeline, which has not seen it, on all ranks."""
        dropped = self.dropped
        try:
            yield
        finally:
            self.dropped = dropped

    def go_on(self) -> None:
        """Report a call of the denoiser or the encoder. Raises OutputNeeded on all ranks if they may need the image."""
        if self.running and self.dropped:
            raise OutputNeeded


class ParallelVae:
    """One VAE whose `encode` and `decode` run in `mode` during a pipeline call."""

    def __init__(
        self, vae: nn.Module, mode: str, mesh: AxisComm, verifications: VerificationCache | None, state: VaeCallState
    ) -> None:
        self.vae, self.mode, self.state = vae, mode, state
        self.split = {name: SplitMethod(vae, name, mesh, verifications) for name in METHODS}
        self._first = mesh[1].rank == 0
        self._has_warned = False
        self._hooks = HookSet()
        for name in METHODS:
            self._hooks.replace(vae, name, self._wrapped(name, getattr(vae, name)))

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        argument = next(iter(inspect.signature(method).parameters), "x")

        @functools.wraps(method)  # some pipelines read its signature
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.state.running:
                return method(*args, **kwargs)
            x, *rest = args if args else (kwargs.pop(argument),)
            return self._run(name, VaeCall(method, x, tuple(rest), kwargs))

        return wrapped

    def _run(self, name: str, call: VaeCall) -> Any:
        if name == "encode":
            self.state.go_on()
        if self.mode in ("auto", "exact") and not self._tiling_wins():
            try:
                return self._exactly(name, call)
            except (PlanError, VerificationError) as error:
                self._give_up(error)
        return self._whole(name, call)

    def _exactly(self, name: str, call: VaeCall) -> Any:
        if not self.split[name].takes(call):
            return call.on(call.x)
        everywhere = name == "encode" or self.state.everywhere
        output = self.split[name](call, everywhere=everywhere)
        self.state.dropped |= not everywhere
        return output

    def _whole(self, name: str, call: VaeCall) -> Any:
        """Encode on every rank, since all need the latent; decode on the first only."""
        with in_tiles(self.vae) if self.mode == "tiled" else nullcontext():
            if name == "encode" or self.state.everywhere or call.x.ndim not in (4, 5):
                return call.on(call.x)
            self.state.dropped = True
            with sampled_on_one_rank():
                return call.on(call.x) if self._first else stand_in(call)

    def _tiling_wins(self) -> bool:
        tiled = bool(getattr(self.vae, "use_tiling", False))
        if tiled and not self._has_warned:
            self._say(f"{type(self.vae).__name__} has tiling switched on, so one rank decodes, tile by tile")
        return tiled

    def _give_up(self, error: Exception) -> None:
        """Raise `error` in mode "exact"; in mode "auto" log a warning and run whole, from now on or this image."""
        if self.mode == "exact":
            raise type(error)(f"{error}: use vae='rank0', or vae='tiled' to save memory") from error
        if isinstance(error, (UnsupportedModel, VerificationError)):  # else the bands of this image are too thin
            self.mode = "rank0"
        self._say(f"one rank runs {type(self.vae).__name__} whole, because it cannot be split: {error}")

    def _say(self, what: str) -> None:
        self._has_warned = True
        if self._first:
            log.warning("%s", what)

    def restore(self) -> None:
        """Restore the VAE's own methods."""
        self._hooks.close()


class ParallelVaes:
    """All VAEs of a pipeline, its networks with `encode` and `decode`. `mesh`: the ranks of one image."""

    def __init__(
        self,
        components: Mapping[str, Any],
        denoisers: Sequence[nn.Module],
        mode: str,
        mesh: AxisComm,
        verifications: VerificationCache | None = None,
    ) -> None:
        self.state, self.comm = VaeCallState(everywhere=mesh[1].size == 1), mesh[0]
        compiled_or_not = (getattr(module, "_orig_mod", module) for module in components.values())
        found = {id(module): module for module in compiled_or_not if _is_vae(module)}
        self.vaes = [ParallelVae(module, mode, mesh, verifications, self.state) for module in found.values()]
        self._hooks = HookSet()
        for module in denoisers:
            self._hooks.before(module, lambda *_: self.state.go_on())

    def forget(self) -> None:
        """Verify again at the next call, since the modules may have changed."""
        for vae in self.vaes:
            for split in vae.split.values():
                split.forget()

    def control(self, *, exchange: str) -> None:
        """Switch the exchange between bands "off", wrong on purpose, for negative controls."""
        for vae in self.vaes:
            for split in vae.split.values():
                split.exchanging = exchange != "off"

    def restore(self) -> None:
        """Restore all VAEs and denoisers."""
        for vae in self.vaes:
            vae.restore()
        self._hooks.close()
        self.vaes = []


def _is_vae(module: Any) -> bool:
    return isinstance(module, nn.Module) and all(callable(getattr(module, name, None)) for name in METHODS)


@contextmanager
def in_tiles(vae: Any) -> Iterator[None]:
    """Enable diffusers' tiling while open. Raises UnsupportedModel for a VAE that has none."""
    if not (hasattr(vae, "enable_tiling") and hasattr(vae, "use_tiling")):  # some have diffusers' method only
        raise UnsupportedModel(f"{type(vae).__name__} cannot run in tiles: use vae='rank0' or vae='exact'")
    before = vae.use_tiling
    vae.enable_tiling()
    try:
        yield
    finally:
        vae.use_tiling = before


def stand_in(call: VaeCall) -> Any:
    """Return zeros of the decoded shape, for a rank whose image is not used: a decoded corner shows the ratio.

    The image itself of a VAE that decodes no corner, since it has images of one size only.
    """
    rows, columns = (min(CORNER, size) for size in call.x.shape[-2:])
    with random_numbers_kept(call):
        try:
            corner = call.on(call.x[..., :rows, :columns].contiguous())
        except Exception as error:
            if not is_of_the_split(error):
                raise
            return call.on(call.x)

    def whole(x: Tensor) -> Tensor:
        height, width = (x.shape[dim] * call.x.shape[dim] // size for dim, size in ((-2, rows), (-1, columns)))
        return x.new_zeros((*x.shape[:-2], height, width))

    return joined(corner, whole)
