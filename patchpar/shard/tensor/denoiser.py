"""A transformer divided by features over the ranks of an axis: find the plan, cut, verify."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import floats_in
from patchpar.errors import UnsupportedModel
from patchpar.shard.argument_changes import held_by
from patchpar.shard.compiled import compiled_in
from patchpar.shard.foreign.refusals import refuse_untrusted
from patchpar.shard.precision import full_precision
from patchpar.shard.step_caches import caches_set_aside
from patchpar.shard.tensor.feature_plan import FeaturePlan
from patchpar.shard.tensor.lookup import WAY_OUT, find_plan, plan_facts
from patchpar.shard.tensor.sharder import FeatureSharder, WholeBlocks
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.verification import Call, Comparison, Forward, relative_error, rounding_limit, verify_once
from patchpar.shard.verification_cache import VerificationCache


class TensorDenoiser:
    """A denoiser of which each rank of the axis holds some features. Its own forward then adds up over the ranks.

    Call `prepare` before every call. `exchange` is "on", or "off", with which nothing is added up: a negative control,
    from the next `prepare` on.
    `error`: relative error of the verification. Without `verifications` nothing is cached or verified.
    """

    def __init__(self, denoiser: nn.Module, mesh: AxisComm, verifications: VerificationCache | None) -> None:
        self.denoiser, self.mesh, self.verifications = denoiser, mesh, verifications
        self.plan: FeaturePlan | None = None
        self.error: float | None = None
        self.exchange = "on"
        self.weights = WholeBlocks()
        """Where the weights of blocks are."""
        self.together = mesh
        """The ranks that call each method together; set it before the first call."""
        self._sharder: FeatureSharder | None = None
        self._known: set[tuple[str, ...]] = set()  # signatures of calls

    def resume(self, call: Call) -> bool:
        """Return whether the denoiser is cut for such a call; if so, nothing is left to do before it."""
        if self._sharder is None or CallArguments.of(self.denoiser, *call).signature() not in self._known:
            return False
        self._sharder.exchange = self.exchange
        return True

    def prepare(self, forward: Forward, call: Call) -> None:
        """Cut the denoiser for such a call, unless it is; `forward` is its own. Collective.

        Arguments of other names or dims are verified anew, for which all weights are gathered. Raises UnsupportedModel,
        VerificationError, PlanError where whole weights do not fit a device, ExchangeError.
        """
        if self.resume(call):
            return
        signature = CallArguments.of(self.denoiser, *call).signature()
        self._make_whole()
        kind = type(self.denoiser).__name__
        if compiled_in(self.denoiser):
            raise UnsupportedModel(f"{kind} has compiled modules, whose graphs hold whole weights: {WAY_OUT}")
        refuse_untrusted(self.denoiser, self.verifications, f"tensor={self.mesh[1].size}", "use tensor=1")
        with torch.no_grad(), caches_set_aside(self.denoiser):
            if self.plan is None:
                self.plan = find_plan(self.denoiser, self.mesh, forward, call, self.verifications, self.weights.take)
            try:
                self._verify(self.plan, forward, call)
            except BaseException:
                self._make_whole()
                raise
        self._known.add(signature)

    def restore(self) -> None:
        """Make all weights whole, and forget the plan: the denoiser may change now. Idempotent. Collective.

        Raises PlanError, with nothing changed, where they do not fit a device. Raises ExchangeError.
        """
        self._make_whole()
        self.plan = None
        self._known.clear()

    def _make_whole(self) -> None:
        if self._sharder is not None:
            self._sharder.restore()
            self._sharder = None

    def _cut(self, plan: FeaturePlan) -> FeatureSharder:
        if self._sharder is None:
            self._sharder = FeatureSharder(self.denoiser, plan, self.mesh, self.weights, self.together)
        return self._sharder

    def _verify(self, plan: FeaturePlan, forward: Forward, call: Call) -> None:
        """Cut the denoiser; at the first use compare it with the whole one."""
        if self.verifications is not None:
            size = self.mesh[1].size
            facts = {**plan_facts(self.denoiser, size, call), "features": plan.to_json()}
            facts["dtype"] = str(getattr(self.denoiser, "dtype", None))
            what = f"{plan.denoiser} with its features divided between {size} ranks"
            compare = partial(self._compared, plan, forward, call)
            self.error = verify_once(
                self.verifications, facts, self.mesh, compare, what, f": {WAY_OUT}. What was found:\n{plan}"
            )
        self._cut(plan).exchange = self.exchange

    def _compared(self, plan: FeaturePlan, forward: Forward, call: Call) -> Iterator[list[Comparison]]:
        arguments = CallArguments.of(self.denoiser, *call)
        with full_precision():
            whole = arguments.passed_to(forward)
            held = _shapes_held(whole, call)
            self._cut(plan)
            own = arguments.passed_to(forward)
            if _shapes_held(own, call) != held:  # on all ranks alike
                raise UnsupportedModel(
                    f"{plan.denoiser} writes keys of its own heads to a cache that other calls read, of which each "
                    f"rank would have only a part: {WAY_OUT}"
                )
            pairs = list(zip(floats_in(own), floats_in(whole), strict=True))
            compared = [Comparison(relative_error(x, y), rounding_limit([y])) for x, y in pairs]
        yield compared


def _shapes_held(output: Any, call: Call) -> list[torch.Size]:
    """Return the shapes of the tensors that objects in an output, and in the arguments of its call, hold."""
    return [x.shape for x, _ in held_by((output, call))]
