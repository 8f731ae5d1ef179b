"""Verify the split of guidance: compare the joined prediction with the plain forward of the whole batch.

The arguments that carry the batch are found by their shapes, which may mislead: the first call of every form is
verified.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import floats_in, with_own_lists
from patchpar.errors import UnsupportedModel, VerificationError
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.batch_arguments import Layers, carriers_of
from patchpar.shard.fingerprint import Fingerprint
from patchpar.shard.foreign.check import ForeignCheck
from patchpar.shard.foreign.cuts import branch_cuts
from patchpar.shard.foreign.guarded_call import GuardedCall, Run
from patchpar.shard.step_caches import caches_set_aside
from patchpar.shard.unsupported_model import is_out_of_memory
from patchpar.shard.verification import (
    Call,
    Comparison,
    arguments_of,
    call_signature,
    facts_of,
    relative_error,
    rounding_limit,
    verify_once,
)
from patchpar.shard.verification_cache import VerificationCache
from patchpar.shard.watched_network import WatchedNetwork

EMPTY = Fingerprint({}, {})


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
        self.inner: Sequence[ForeignCheck] = ()
        """Of layers inside this one, whose comparisons are no part of a call."""
        self.foreign = ForeignCheck(denoiser, (self.comm, self._together), verifications, self._is_inner_comparing)

    def run(self, split: Callable[[], Any], plain: Callable[..., Any], call: Call, *, remembers: bool) -> Any:
        """Return the output of `split`, compared with the plain forward where that is needed. Collective.

        `remembers`: it may use values of earlier steps. Raises VerificationError, UnsupportedModel.
        """
        self._look()
        form, kept = call_signature(call), with_own_lists(call)
        before = self._watched.now() if self.foreign.is_needed and form not in self._seen else EMPTY

        def smaller() -> Iterator[GuardedCall]:
            for whole, own in self.carriers.smaller_parts(plain, kept, self.axis.rank):
                yield replace(guarded, plain=self._set_aside(whole), split=self._set_aside(own), smaller=tuple)

        guarded = GuardedCall(
            form=form,
            split=split,
            plain=self._set_aside(lambda: plain(*kept[0], **kept[1])),
            smaller=smaller,
            cuts=partial(branch_cuts, self.axis),
            exactly=self._nothing_to_compare if remembers and form in self._seen else None,
            divides=lambda: self.clock.branches > 1,
            what=f"{type(self.denoiser).__name__} with the branches of guidance on {self.axis.size} ranks",
            mixed="guidance branches",
            way_out="run it with cfg=1 and give the devices to another axis, e.g. patch",
        )
        joined = self.foreign.run(guarded)
        if self.clock.branches > 1 and form not in self._seen:  # otherwise each branch has its own call
            if self.foreign.is_needed:  # it has been compared
                self._remember(form, before)
            else:
                self._verify(plain, call, joined)
        return joined

    def _set_aside(self, run: Run) -> Run:
        """Return a run in which no cache skips blocks."""

        def without_cache() -> Any:
            with caches_set_aside(self.denoiser):
                return run()

        return without_cache

    def _remember(self, form: Any, before: Fingerprint) -> None:
        self._seen.append(form)
        self._watched.record(before)

    def carriers_of(self, plain: Callable[..., Any], call: Call) -> Mapping[str, int | None]:
        """Return which dims of the arguments carry the batch, see `BatchArguments.of`. Raises as `run`."""
        self._look()
        with self.foreign.set_aside(plain) as from_before:
            try:
                return self.carriers.of(from_before, call)
            except VerificationError as error:
                if not self.foreign.names:
                    raise
                raise VerificationError(f"{error}. {self.foreign.blamed} may mix guidance branches") from error

    def _look(self) -> None:
        """Discard what is known of a denoiser that has changed."""
        now, self.unsure = self._watched.look(unsure=self.unsure), False
        if now is not None:
            self._seen.clear()
            self.foreign.look(now)

    def _is_inner_comparing(self) -> bool:
        return any(each.is_comparing for each in self.inner)

    def _nothing_to_compare(self) -> Any:
        raise UnsupportedModel(
            f"{self.foreign.blamed} does what it did not in earlier steps, in a step with stale values, which cannot "
            "be compared with a plain call: use strategy=exact"
        )

    def _verify(self, plain: Callable[..., Any], call: Call, joined: Any) -> None:
        form = call_signature(call)
        split: dict[str, Any] = {"strategy": "cfg", "places": self.axis.size}
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
        self._remember(form, before)

    def _compared(self, plain: Callable[..., Any], call: Call, joined: Any) -> Iterator[list[Comparison]]:
        """Compare the call; with fewer tokens where a rank has no memory for a plain forward of the whole batch."""
        with torch.no_grad():
            want = self._plain_prediction(plain, call)
            fits = self.carriers.every_rank(want is not None)
            if not fits or want is None:
                found = self.carriers.compared_smaller(plain, call)
            else:
                error = max(relative_error(x, y) for x, y in zip(floats_in(joined), want, strict=True))
                found = Comparison(error, rounding_limit(want))
        yield [found]

    def _plain_prediction(self, plain: Callable[..., Any], call: Call) -> list[Tensor] | None:
        """Return what the plain forward returns; None where this rank has no memory for it."""
        try:
            return floats_in(plain(*call[0], **call[1]))
        except Exception as failure:
            if not (self.carriers.alone and is_out_of_memory(failure)):
                raise
            return None
