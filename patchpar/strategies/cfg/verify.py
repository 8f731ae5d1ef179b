"""Verify the split of guidance: compare the joined prediction with the plain forward of the whole batch.

The arguments that carry the batch are found by their shapes, which may mislead: the first call of every form is
verified.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import AxisComm
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
    facts_of,
    relative_error,
    verify_once,
)
from patchpar.shard.verification_cache import VerificationCache


class GuidanceCheck:
    """Verification of one denoiser whose guidance branches are on the ranks of `axis`.

    `unsure`: the denoiser may have changed since the last call. `by_branch`: its layers that treat branches
    differently, see `shard.guidance_branches`. `together`: all ranks that a plain forward takes, if it takes more.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        mesh: AxisComm,
        clock: StepClock,
        verifications: VerificationCache,
        by_branch: Layers = tuple,
        *,
        together: Axis | None = None,
    ) -> None:
        self.denoiser, self.clock, self.verifications = denoiser, clock, verifications
        self.comm, self.axis = mesh
        self._together = together or self.axis
        self._seen: list[Any] = []
        self.carriers = carriers_of(denoiser, mesh, verifications, by_branch, together=together)
        self._watched, self.unsure = WatchedNetwork(denoiser), False

    def __call__(self, plain: Callable[..., Any], call: Call, joined: Any) -> None:
        """Compare `joined`, if of several branches, with the plain forward. Collective. Raises VerificationError."""
        if self.clock.branches == 1:  # each branch has its own call, and no batch is split
            return
        if self.unsure and self._watched.has_changed:
            self._seen.clear()
        self.unsure = False
        form = call_signature(call)
        if form in self._seen:
            return
        split = {"strategy": "cfg", "places": self.axis.size}
        facts = facts_of(self.denoiser, self.comm.transport.device, call, **split)
        what = f"{type(self.denoiser).__name__} with the branches of guidance on {self.axis.size} ranks"
        way_out = (
            f": the batch may be in an argument where it is not detected ({', '.join(arguments_of(call))}). "
            "Run it with cfg=1 and give the devices to another axis, e.g. patch"
        )
        before = self._watched.now()
        with caches_set_aside(self.denoiser):
            compare = partial(self._compared, plain, call, joined)
            verify_once(self.verifications, facts, (self.comm, self._together), compare, what, way_out)
        self._seen.append(form)
        self._watched.record(before)

    def _compared(self, plain: Callable[..., Any], call: Call, joined: Any) -> Iterator[list[Comparison]]:
        args, kwargs = call
        with torch.no_grad():
            want = floats_in(plain(*args, **kwargs))
        error = max(relative_error(x, y) for x, y in zip(floats_in(joined), want, strict=True))
        yield [Comparison(error, max(TOLERANCE[x.dtype] for x in want))]
