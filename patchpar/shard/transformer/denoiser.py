"""A transformer whose tokens are split between the ranks of an axis: discover, verify, run.

The counterpart of `shard.unet` for transformers.
"""

import logging
from collections.abc import Hashable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from patchpar.comm.collectives import AllGather
from patchpar.errors import UnsupportedModel, VerificationError
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.group_offload import refuse_elsewhere
from patchpar.shard.stale.state import StaleState
from patchpar.shard.step_caches import caches_set_aside, refuse_caches
from patchpar.shard.transformer.attention import TokenSplit, cut_for
from patchpar.shard.transformer.attention_backend import BackendChoice, BackendKernel, needing_torch_attention
from patchpar.shard.transformer.guard import TokenComparison
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.plan_lookup import GivenPlan, PlanSearch
from patchpar.shard.transformer.token_plan import NotWatched, TokenPlan
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.transformer.verify import compared_call, refusal, why_no_old_values
from patchpar.shard.unsupported_model import is_of_the_split
from patchpar.shard.verification import Call, Forward, call_signature, facts_of, verify_once

log = logging.getLogger(__name__)


class TokenDenoiser(SharedDenoiser):
    """A denoiser whose calls are split by tokens. Every rank passes and gets whole tensors.

    The plan is cached with the `verifications`; without any, it is searched again and not verified.
    """

    _learns: ClassVar[str] = "plan"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan: TokenPlan | None = None
        self._shard: TransformerSharder | None = None
        self._plans: list[tuple[Any, TokenPlan]] = []  # by the signature of calls so far
        self._choice = BackendChoice(self.denoiser)
        self._search: PlanSearch | GivenPlan = PlanSearch(self.denoiser, self.mesh, self.verifications)

    def use_plan(self, plan: TokenPlan) -> None:
        """Split tokens by this plan, without a search, which needs values."""
        self._search = GivenPlan(plan)

    def denoise(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Returns its output for the whole image.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError.
        """
        self._make_sure()
        before = self._look() if self._shard is None else None
        output = self._denoised(forward, *args, **kwargs)
        if before is not None:
            self.watched.record(before)
        return output

    def prepare(self, forward: Forward, /, *args: Any, **kwargs: Any) -> None:
        """Find the tokens of such a call, and verify that they can be split, unless it is known.

        Raises UnsupportedModel, and what `denoise` raises.
        """
        self._make_sure()
        before = self._look() if self._shard is None else None
        with self._choice.set_aside() as kernel:
            self._prepare_first(forward, (args, kwargs), call_signature((args, kwargs), self.ignored), kernel)
        if before is not None:
            self.watched.record(before)

    def exactly(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole image of a call that is prepared, with fresh keys. Raises ExchangeError."""
        assert self._shard is not None
        self._this_step()
        with self._choice.set_aside() as kernel:
            self._shard.split = self._split(kernel, wrong=False)
            return self._shard.denoise(forward, *args, **kwargs)

    def _prepare_first(self, forward: Forward, call: Call, signature: Any, kernel: BackendKernel | None) -> bool:
        """Prepare such calls; return whether it is the first of them."""
        first = not self._is_ready_for(signature)
        if first:
            self._prepare(forward, call, signature, kernel)
        return first

    def _denoised(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        signature, call = call_signature((args, kwargs), self.ignored), (args, kwargs)
        with self._choice.set_aside() as kernel:
            first = self._prepare_first(forward, call, signature, kernel)
            output = self._guarded(signature, kernel, forward, call)
            for name, ranges in self._ranges().items() if first and self.patch.group_rank == 0 else ():
                log.info("%s, %s: %s", type(self.denoiser).__name__, name, ranges)
            return output

    def _guarded(self, signature: Any, kernel: BackendKernel | None, forward: Forward, call: Call) -> Any:
        split = partial(self._run_or_prepare, signature, kernel, forward, call)
        if not self.foreign.is_needed or self.exchange != "on":
            return split()
        remembers, ranks = self.history is not None, self.patch.axis.size
        found = TokenComparison(self.denoiser, kernel, forward, self.exactly, call, remembers, lambda: self._shard)
        try:
            return self.foreign.run(found.of(split, ranks, signature))
        except (VerificationError, UnsupportedModel):
            self._take_out()  # otherwise the next call would run the unverified split
            raise

    def _ranges(self) -> dict[str, TokenRanges]:
        return {} if self._shard is None else self._shard.ranges

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens of each list of blocks in the running call, as far as it has come."""
        return tuple(each.num_tokens for each in self._ranges().values())

    def _run_or_prepare(self, signature: Any, kernel: BackendKernel | None, forward: Forward, call: Call) -> Any:
        try:
            return self._run(signature, kernel, forward, call)
        except NotWatched as error:  # the signature does not show it: every rank raises at the same block
            self.foreign.rewind()
            self._prepare(forward, call, signature, kernel, unforeseen=error)
            return self._run(signature, kernel, forward, call)

    def _is_ready_for(self, signature: Any) -> bool:
        """Whether there is a plan for calls of that signature; if so, install it."""
        plan = next((plan for known, plan in self._plans if known == signature), None)
        if plan is None:
            return False
        if self._shard is None or plan is not self.plan:
            self._take_up(plan)
        return True

    def _run(self, signature: Any, kernel: BackendKernel | None, forward: Forward, call: Call) -> Any:
        assert self._shard is not None
        self._shard.split = self._split(kernel)
        if self.history is not None:
            return self._with_stale_state(self.history, signature, forward, call)
        self._this_step()
        return self._steady(self._of_grids(self._exact_kind), partial(self._shard.denoise, forward), call)

    def _of_grids(self, kind: Hashable | None) -> Hashable | None:
        """Return a kind of step with the grids of the tokens: as many may lie in another grid in the next image."""
        assert self._shard is not None
        return None if kind is None else (kind, tuple(self._shard.grids.items()))

    # --- the first call of a signature --------------------------------------------------------------------------

    def _prepare(
        self,
        forward: Forward,
        call: Call,
        signature: Any,
        kernel: BackendKernel | None,
        unforeseen: NotWatched | None = None,
    ) -> None:
        """Find the tokens of such calls and verify that splitting them does not change the result.

        `unforeseen`: raised by a block that is called otherwise than at the first call of that signature.
        """
        refuse_caches(self.denoiser, stale=self.history is not None, by_tokens=True)
        refuse_elsewhere(self.denoiser, self.patch.comm.transport.device)
        kept = self.foreign.set_aside(forward)
        with caches_set_aside(self.denoiser), kept as forward, needing_torch_attention(self.denoiser, kernel):
            if unforeseen is None:
                self._know(forward, call)
            else:
                if self.history is not None:
                    self.history.lose()
                self._extend(self._search.find_anew(forward, call, unforeseen, known=self.plan))
                self._check(forward, call, known=False)
        assert self.plan is not None
        self._refuse_old_values(self.plan)
        self._plans = [entry for entry in self._plans if entry[0] != signature] + [(signature, self.plan)]

    def _refuse_old_values(self, plan: TokenPlan) -> None:
        """Raise UnsupportedModel for stale keys in a model whose tokens meet outside attention, where all are fresh."""
        words = "" if self.history is None else why_no_old_values(plan)
        if words:
            self._take_out()
            raise UnsupportedModel(words)

    def _know(self, forward: Forward, call: Call) -> None:
        """Install the plan of other calls, else the known one of this model, else search for one."""
        before = self.plan
        try:
            if self._shard is None:
                self._take_up(before or self._search.find(forward, call))
            self._check_or_extend(forward, call, known=before is not None and not self._search.is_of_all_calls)
        except Exception as error:  # the same on all ranks
            watched_now = before is None and not self._search.second_hand
            if watched_now or not is_of_the_split(error):
                raise
            self._take_up(self._search.find_anew(forward, call, error))
            self._check(forward, call, known=False)

    def _check_or_extend(self, forward: Forward, call: Call, *, known: bool) -> None:
        try:
            self._check(forward, call, known=known)
        except NotWatched:  # every rank raises at the same block
            self._extend(self._search.find(forward, call, known=self.plan))
            self._check(forward, call, known=False)

    def _extend(self, found: TokenPlan) -> None:
        """Add what was found for other calls to the plan; it covers the calls of the plan before."""
        assert self.plan is not None
        before, joined = self.plan, self.plan.joined(found)
        self._plans = [(signature, joined if plan is before else plan) for signature, plan in self._plans]
        self._take_up(joined)

    def _take_up(self, plan: TokenPlan) -> None:
        self._take_out()
        self.plan, self._shard = plan, TransformerSharder(self.denoiser, plan, self._split())
        self.patch.kv_sizes = dict.fromkeys(plan.attentions, 1.0)

    def _check(self, forward: Forward, call: Call, *, known: bool) -> None:
        """Verify; without verification, check that a plan of other calls covers this one."""
        shard = self._shard
        assert shard is not None
        self._this_step()
        shard.split = self._split(wrong=False)
        try:
            if self.verifications is not None:
                split = partial(self._split_call, forward)
                compare = partial(compared_call, shard, forward, call, self.together, split)
                self.error = verify_once(self.verifications, self._facts(call), self.mesh, compare, *refusal(shard))
            elif known:
                self._split_call(forward, *call[0], **call[1])
        except BaseException:
            self._take_out()  # otherwise the next call would run the unverified split
            raise

    def _split_call(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call for verification as it will be split."""
        assert self._shard is not None
        return self._shard.denoise(forward, *args, **kwargs)

    def _facts(self, call: Call) -> dict[str, Any]:
        """Return what the verification result depends on."""
        (comm, axis), policy = self.mesh, self.patch.policy
        cut, ranks = f"{cut_for(policy)}, text {policy.text}", axis.ratio or axis.size
        split = {"tokens": str(self.plan), "strategy": policy.name, "cut": cut, "ranks": ranks}
        return facts_of(self.denoiser, comm.transport.device, call, self.ignored, **split)

    def _split(self, kernel: BackendKernel | None = None, *, wrong: bool | None = None) -> TokenSplit:
        patch = self.patch
        alone = self.exchange == "off" if wrong is None else wrong
        mode = None if alone else partial(attend_together, patch.policy.keys)
        gathers = patch.policy.keys.algorithm == "gather"
        cut, text = cut_for(patch.policy), patch.policy.text == "split" and self.exchange != "frozen"
        return TokenSplit(patch.comm, patch.axis, mode, patch, kernel if gathers else None, cut, text)

    def _this_step(self) -> None:
        self.patch.fresh, self.patch.cache = True, None

    def _with_stale_state(self, history: StaleState, signature: Any, forward: Forward, call: Call) -> Any:
        """Run with stale keys, where there are any and the policy uses them."""
        assert self._shard is not None
        self._look_back(history, signature, call)
        step = partial(self._stale_step, history, self._shard, forward)
        output, gathered = self._steady(self._of_grids(history.steady_kind), step, call)
        history.receive(gathered, fresh=self.patch.fresh)
        return output

    def _stale_step(
        self, history: StaleState, shard: TransformerSharder, forward: Forward, *args: Any, **kwargs: Any
    ) -> tuple[Any, list[list[Tensor]]]:
        """Return the output, and what all ranks report: all of a step that depends on its arguments alone."""
        output = shard.denoise(forward, *args, **kwargs)
        history.cache.end()
        return output, self._gathered(history.report())

    def _gathered(self, own: list[Tensor]) -> list[list[Tensor]]:
        gather = AllGather(self.patch.comm, self.patch.axis, "prediction", "drift")
        return [[gathered] for gathered in gather.same(own[0])] if own else []

    def reset(self) -> None:
        """Begin an image: nothing of the last one is used. Raises ExchangeError."""
        if self._shard is not None:
            self._shard.begin()
        super().reset()

    def _unlearn(self) -> None:
        self.plan, self._choice = None, BackendChoice(self.denoiser)

    def restore(self) -> None:
        """Remove the hooks."""
        self._take_out()
        self._plans.clear()

    def _take_out(self) -> None:
        self._drop_graphs()
        if self._shard is not None:
            self._shard.restore()
            self._shard = None
