"""Get the token plan of a denoiser: from the cache, from the package, or by a search, in this order.

    kept       cached by an earlier program on this machine
    shipped    part of the package
    watched    found now by running the denoiser

A plan that is kept or shipped is second-hand: where it does not fit, the denoiser is searched after all.
"""

import logging
from typing import Any

from torch import nn

from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.shard.compiled import refuse_wrapped, uncompiled
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.probe.latent import name_of_latent
from patchpar.shard.transformer.probe.smaller_call import smaller_calls
from patchpar.shard.transformer.shipped_plans import shipped_for
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.transformer.token_plan_json import from_json, to_json
from patchpar.shard.unsupported_model import in_one_line, is_of_the_split, is_out_of_memory
from patchpar.shard.verification import Call, Forward, arguments_of, fingerprint_of
from patchpar.shard.verification_cache import VerificationCache

log = logging.getLogger(__name__)


class GivenPlan:
    """Answers a search with a plan that is known, for calls without values, in which nothing can be found."""

    second_hand, is_of_all_calls = False, True

    def __init__(self, plan: TokenPlan) -> None:
        self._plan = plan

    def find(self, forward: Forward, call: Call, *, known: TokenPlan | None = None) -> TokenPlan:
        """Return the plan. Raises UnsupportedModel for a call that `known` does not cover: it is this plan."""
        if known is not None:
            raise UnsupportedModel(f"the known plan of {self._plan.denoiser} does not cover this call: {known}")
        return self._plan

    def find_anew(self, forward: Forward, call: Call, why: Exception, known: TokenPlan | None = None) -> TokenPlan:
        """Raise UnsupportedModel: the plan does not fit, and there is no other."""
        raise UnsupportedModel(
            f"the known plan of {self._plan.denoiser} does not fit this call ({in_one_line(why)})"
        ) from why


class PlanSearch:
    """Finds plans for one denoiser. Collective: all ranks of the axis call it and get the first rank's plan.

    Without `verifications` plans are neither cached nor taken from the package, since they would not be verified.
    `second_hand`: whether the plan was cached or shipped.
    """

    is_of_all_calls = False

    def __init__(self, denoiser: nn.Module, mesh: AxisComm, verifications: VerificationCache | None) -> None:
        self.denoiser, self.mesh, self.verifications = denoiser, mesh, verifications
        self.second_hand = False

    def find(self, forward: Forward, call: Call, *, known: TokenPlan | None = None) -> TokenPlan:
        """Return a plan for calls like this one; `known` is one for other calls, which does not cover this one.

        Raises UnsupportedModel where none is found, PlanError where no rank has the memory to find it.
        """
        refuse_wrapped(self.denoiser)
        plan = self._kept(call, otherwise=True)
        if plan is None and known is None:
            plan = self._kept(call, otherwise=False) or self._shipped()
        second_hand = plan is not None or (known is not None and self.second_hand)
        # Ranks agree first: if one searched alone, the others would not gather its sharded weights.
        agreed = self._first_of_all(plan, second_hand=second_hand)
        if agreed is not None:
            return agreed
        return self._agreed(self._watched(forward, call, known is not None, known), second_hand=second_hand)

    def find_anew(self, forward: Forward, call: Call, why: Exception, known: TokenPlan | None = None) -> TokenPlan:
        """Return a plan found by a search, since the known one does not fit. Raises PlanError as `find`.

        `known`: a plan that fits other calls of this program; if it was found by a search, its blocks stay valid.
        """
        self._warn(f"the known plan for splitting its tokens does not fit ({in_one_line(why)})")
        found = self._watched(forward, call, otherwise=True, known=None if self.second_hand else known)
        if self.second_hand and found is not None:
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
            self._warn(f"its blocks differ from those of diffusers {shipped.diffusers}, for which a plan is shipped")
        return plan

    def _watched(
        self, forward: Forward, call: Call, otherwise: bool, known: TokenPlan | None = None
    ) -> TokenPlan | None:
        with uncompiled(self.denoiser):  # functions in compiled graphs cannot be intercepted
            found = self._discovered(forward, call, known)
        if found is not None:
            self._keep(found, call, otherwise=otherwise)
        return found

    def _discovered(self, forward: Forward, call: Call, known: TokenPlan | None) -> TokenPlan | None:
        """Search with that call, or with fewer tokens where memory is short: a plan holds for any number of them.

        None where there is no memory for any.
        """
        arguments = CallArguments.of(self.denoiser, *call)
        try:
            return discover_tokens(self.denoiser, forward, *call, known=known)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fewer = smaller_calls(arguments, name_of_latent(self.denoiser, arguments))
        for each in fewer:
            try:
                return discover_tokens(self.denoiser, forward, each.args, each.kwargs, known=known)
            except Exception as error:
                if not (is_out_of_memory(error) or is_of_the_split(error)):
                    raise
        return None

    def _keep(self, found: TokenPlan, call: Call, *, otherwise: bool) -> None:
        if self.verifications is not None:
            facts = self._facts(call, otherwise)
            self.verifications.remember(self.verifications.key(facts), facts, plan=to_json(found))

    def _facts(self, call: Call, otherwise: bool) -> dict[str, Any]:
        signature = arguments_of(call) if otherwise else CallArguments.of(self.denoiser, *call).signature()
        return {**fingerprint_of(self.denoiser), "plan for": signature}

    def _agreed(self, plan: TokenPlan | None, *, second_hand: bool) -> TokenPlan:
        """Return the plan of the first rank that has one on all ranks: all must cut alike. Raises PlanError."""
        found = self._first_of_all(plan, second_hand=second_hand)
        if found is None:
            raise PlanError(
                f"no rank has the memory to find the tokens of {type(self.denoiser).__name__} in a plain forward: use "
                "a smaller image first, for which they are found once and cached"
            )
        return found

    def _first_of_all(self, plan: TokenPlan | None, *, second_hand: bool) -> TokenPlan | None:
        """Return the plan of the first rank that has one, on all ranks; None if none has."""
        own = b"" if plan is None else bytes([second_hand]) + to_json(plan).encode()
        first = next(filter(None, AllGather(*self.mesh, "verify", "token plan").of_bytes(own)), None)
        if first is None:
            return None
        self.second_hand = bool(first[0])
        return from_json(first[1:].decode())

    def _warn(self, what: str) -> None:
        if self.mesh[1].rank == 0:
            log.warning("%s: %s. Its tokens are searched now, once", type(self.denoiser).__name__, what)
