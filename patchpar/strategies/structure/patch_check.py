"""Foreign code in a denoiser whose calls compute patches of a large image: what holds for any number of ranks.

A hook that works on a whole image works on each patch here, on one rank as on several: that is what structure guidance
is. Two things would depend on the number of ranks, or mix patches:

    state       what a call keeps would be found by that of another patch, and each rank makes some of the calls
    branches    a rank may have one guidance branch of a patch, where another one has all of them in one call

Teams, which compute a patch in bands, watch foreign code by themselves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import floats_in, with_own_lists
from patchpar.plan.mesh import Axis
from patchpar.shard.foreign.check import ForeignCheck
from patchpar.shard.foreign.cuts import branch_cuts
from patchpar.shard.foreign.guarded_call import GuardedCall
from patchpar.shard.transformer.probe.smaller_call import smaller_calls_of
from patchpar.shard.verification import Call, call_signature
from patchpar.shard.verification_cache import VerificationCache
from patchpar.shard.watched_network import WatchedNetwork

WAY_OUT = "use strategy=exact, or one device without a plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchCall:
    """A call for a patch: of the `plain` denoiser with the arguments of all `branches`, and of its `own` part of them.

    `branch`: which one is computed; None for all of them.
    """

    plain: Callable[..., Any]
    whole: Call
    own: Call
    branch: int | None
    branches: int

    def of_all(self) -> list[Tensor]:
        """Return our branch, of any shape, of the plain call for all branches."""
        assert self.branch is not None
        args, kwargs = with_own_lists(self.whole)
        return [x.chunk(self.branches)[self.branch] for x in floats_in(self.plain(*args, **kwargs))]

    def smaller(self, network: nn.Module) -> "Iterator[PatchCall]":
        """Yield such calls for smaller patches of that network, the largest first."""
        for pair in zip(*(smaller_calls_of(network, each) for each in (self.whole, self.own)), strict=False):
            whole, own = ((each.args, each.kwargs) for each in pair)
            yield replace(self, whole=whole, own=own)

    def of_own(self) -> Any:
        """Return the plain call for our branch."""
        args, kwargs = with_own_lists(self.own)
        return self.plain(*args, **kwargs)


class PatchCheck:
    """Comparison of a denoiser's calls for single branches of a patch with those for all of them, on this rank alone.

    `inner`: the check of this rank's team, if there is one. `unsure`: the denoiser may have been changed since the last
    call.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        comm: Communicator,
        verifications: VerificationCache,
        inner: ForeignCheck | None = None,
    ) -> None:
        alone, is_paused = Axis("patch", ranks=(comm.transport.rank,)), bool
        self._inner, self._denoiser = inner, denoiser
        self.foreign = ForeignCheck(
            denoiser, (comm, alone), verifications, is_paused if inner is None else self._is_inner_comparing
        )
        self.unsure, self._watched = True, WatchedNetwork(denoiser)

    def run(self, split: Callable[[], Any], call: PatchCall) -> Any:
        """Return the output of `split`, which computes such a call. Raises VerificationError, UnsupportedModel."""
        before, self.unsure = self._watched.look(unsure=self.unsure), False
        if before is not None:
            self.foreign.look(before)
        output = self.foreign.run(self._guarded(split, call)) if self.foreign.is_needed else split()
        if before is not None:
            self._watched.record(before)
        return output

    def _guarded(self, split: Callable[[], Any], call: PatchCall) -> GuardedCall:
        axis = Axis("cfg", call.branch or 0, call.branches, tuple(range(call.branches)))
        return GuardedCall(
            form=(call_signature(call.own), call.branch),
            split=split,
            plain=call.of_all,
            cuts=partial(branch_cuts, axis),
            smaller=partial(self._smaller, call),
            exactly=call.of_own,  # `split` may see other windows, or compute in bands
            divides=lambda: call.branch is not None,
            computes="another patch of the image",
            what=f"{type(self._denoiser).__name__} with strategy=structure",
            mixed="guidance branches",
            way_out=WAY_OUT,
        )

    def _smaller(self, call: PatchCall) -> Iterator[GuardedCall]:
        """Yield the calls for smaller patches."""
        return (self._guarded(each.of_own, each) for each in call.smaller(self._denoiser))

    def _is_inner_comparing(self) -> bool:
        return self._inner is not None and self._inner.is_comparing
