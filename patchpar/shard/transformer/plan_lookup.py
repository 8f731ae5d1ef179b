"""Where the token plan of a denoiser comes from.

    kept       an earlier program found it on this machine
    shipped    it comes with the package
    found      the denoiser is watched, now

In this order. A plan that is kept or shipped is at second hand: where it turns out not to fit, the denoiser is watched
after all.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.plan.mesh import Axis
from patchpar.shard.compiled import uncompiled
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.shipped_plans import shipped_for
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.transformer.token_plan_json import from_json, to_json
from patchpar.shard.unsupported_model import in_one_line
from patchpar.shard.verification import Call, arguments_of, fingerprint_of
from patchpar.shard.verification_cache import VerificationCache

Forward = Callable[..., Any]
log = logging.getLogger(__name__)


class PlanSearch:
    """Finds plans for one denoiser; all ranks of the axis call it together, and all get the first one's.

    Without `verifications` nothing is kept, nor taken from what is shipped, since nobody would verify it.
    `second_hand`: whether it was not by watching alone that it was found.
    """

    def __init__(
        self, denoiser: nn.Module, mesh: tuple[Communicator, Axis], verifications: VerificationCache | None
    ) -> None:
        self.denoiser, self.mesh, self.verifications = denoiser, mesh, verifications
        self.second_hand = False

    def find(self, forward: Forward, call: Call, *, known: TokenPlan | None = None) -> TokenPlan:
        """A plan for calls like this one; `known` is one for other calls, which does not cover this one.

        Raises UnsupportedModel.
        """
        plan = self._kept(call, otherwise=True)
        if plan is None and known is None:
            plan = self._kept(call, otherwise=False) or self._shipped()
        second_hand = plan is not None or (known is not None and self.second_hand)
        return self._agreed(plan or self._watched(forward, call, known is not None, known), second_hand=second_hand)

    def find_anew(self, forward: Forward, call: Call, why: Exception, known: TokenPlan | None = None) -> TokenPlan:
        """The plan found by watching, since the one that was known did not do. Raises UnsupportedModel.

        One that has served other calls of this program stays theirs, and if it was found by watching, so does what it
        says of blocks that are called as in those: `known`.
        """
        self._say(f"the plan known for splitting its tokens does not fit ({in_one_line(why)})")
        found = self._watched(forward, call, otherwise=True, known=None if self.second_hand else known)
        if self.second_hand:
            self._keep(found, call, otherwise=False)
        return self._agreed(found, second_hand=False)

    def _kept(self, call: Call, *, otherwise: bool) -> TokenPlan | None:
        if self.verifications is None:
            return None
        return self.verifications.find(self.verifications.key(self._facts(call, otherwise)), "plan", from_json)

    def _shipped(self) -> TokenPlan | None:
        shipped = shipped_for(self.denoiser) if self.verifications is not None else None
        if shipped is None:
            return None
        plan = shipped.plan_for(self.denoiser)
        if plan is None:
            self._say(f"its blocks are others than those of diffusers {shipped.diffusers}, for which a plan is shipped")
        return plan

    def _watched(self, forward: Forward, call: Call, otherwise: bool, known: TokenPlan | None = None) -> TokenPlan:
        with uncompiled(self.denoiser):  # or it would not let itself be watched
            found = discover_tokens(self.denoiser, forward, *call, known=known)
        self._keep(found, call, otherwise=otherwise)
        return found

    def _keep(self, found: TokenPlan, call: Call, *, otherwise: bool) -> None:
        if self.verifications is not None:
            facts = self._facts(call, otherwise)
            self.verifications.remember(self.verifications.key(facts), facts, plan=to_json(found))

    def _facts(self, call: Call, otherwise: bool) -> dict[str, Any]:
        signature = arguments_of(call) if otherwise else CallArguments.of(self.denoiser, *call).signature()
        return {**fingerprint_of(self.denoiser), "plan for": signature}

    def _agreed(self, plan: TokenPlan, *, second_hand: bool) -> TokenPlan:
        """The plan of the first place, whatever the others have found: all must cut alike."""
        comm, axis = self.mesh
        own = torch.frombuffer(bytearray(to_json(plan).encode()), dtype=torch.uint8).to(comm.transport.device)
        gather = AllGather(comm, axis, "verify", "token plan")
        sizes = gather.same(torch.tensor([len(own), second_hand], device=own.device))
        self.second_hand = bool(sizes[0][1])
        first = gather.parts(own, 0, [int(size) for size, _ in sizes])[0]
        return from_json(bytes(first.cpu().tolist()).decode())

    def _say(self, what: str) -> None:
        if self.mesh[1].rank == 0:
            log.warning("%s: %s. Its tokens are looked for now, once", type(self.denoiser).__name__, what)
