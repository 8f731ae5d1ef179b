"""Hold the split of guidance to its promise: the joined prediction against the plain forward of the whole batch.

Which arguments carry the batch is told by their shapes, and a shape may tell it wrongly: the first call of every form
shows it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import floats_in
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.batch_arguments import Layers, carriers_of
from patchpar.shard.fingerprint import WatchedNetwork
from patchpar.shard.step_caches import caches_set_aside
from patchpar.shard.verification import (
    TOLERANCE,
    Call,
    Comparison,
    arguments_of,
    call_signature,
    fingerprint_of,
    relative_error,
    verify_once,
)
from patchpar.shard.verification_cache import VerificationCache


class GuidanceCheck:
    """Checks of one denoiser whose branches of guidance are on the ranks of `axis`.

    `unsure`: somebody may have changed the denoiser since the last call. `by_branch`: its layers that tell branches
    apart, see `shard.guidance_branches`.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        mesh: tuple[Communicator, Axis],
        clock: StepClock,
        verifications: VerificationCache,
        by_branch: Layers = tuple,
    ) -> None:
        self.denoiser, self.clock, self.verifications = denoiser, clock, verifications
        self.comm, self.axis = mesh
        self._seen: list[Any] = []
        self.carriers = carriers_of(denoiser, mesh, verifications, by_branch)
        self._watched, self.unsure = WatchedNetwork(denoiser), False

    def __call__(self, plain: Callable[..., Any], call: Call, joined: Any) -> None:
        """Compare `joined`, where it is of several branches, with what the denoiser's own forward gives for `call`.

        All ranks of the axis come here together. Raises VerificationError.
        """
        if self.clock.branches == 1:  # each branch has a call of its own, and nothing is told by shapes
            return
        if self.unsure and self._watched.has_changed:
            self._seen.clear()
        self.unsure = False
        form = call_signature(call)
        if form in self._seen:
            return
        facts = {
            **fingerprint_of(self.denoiser),
            "strategy": "cfg",
            "places": self.axis.size,
            "device": self.comm.transport.device.type,
            "arguments": arguments_of(call),
        }
        what = f"{type(self.denoiser).__name__} with the branches of guidance on {self.axis.size} ranks"
        way_out = (
            f": one of its arguments carries the batch where nobody looks for it ({', '.join(arguments_of(call))}). "
            "Run it with cfg=1 and give the devices to another axis, e.g. patch"
        )
        before = self._watched.now()
        with caches_set_aside(self.denoiser):
            compare = partial(self._compared, plain, call, joined)
            verify_once(self.verifications, facts, (self.comm, self.axis), compare, what, way_out)
        self._seen.append(form)
        self._watched.know(before)

    def _compared(self, plain: Callable[..., Any], call: Call, joined: Any) -> Iterator[list[Comparison]]:
        args, kwargs = call
        with torch.no_grad():
            want = floats_in(plain(*args, **kwargs))
        error = max(relative_error(x, y) for x, y in zip(floats_in(joined), want, strict=True))
        yield [Comparison(error, max(TOLERANCE[x.dtype] for x in want))]
