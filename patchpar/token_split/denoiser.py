"""A transformer whose calls are computed with tokens split between the ranks of an axis: discover, verify, run.

The counterpart of `patched` for denoisers of tokens.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.caches import caches_set_aside, refuse_caches
from patchpar.clock import StepClock
from patchpar.errors import UnsupportedModel, VerificationError
from patchpar.exchange import Door, Gather
from patchpar.first_use import Call, arguments_of, check_once, form_of, made_of
from patchpar.history import History
from patchpar.key_exchange import KeyExchange
from patchpar.mesh import Axis
from patchpar.sequence.modes import attend_together
from patchpar.shared_denoiser import SharedDenoiser
from patchpar.token_split.attention import Split, cut_for
from patchpar.token_split.grouped import refuse_elsewhere
from patchpar.token_split.kernel import Choice, Kernel, needing_torch_attention
from patchpar.token_split.plan import NotWatched, TokenPlan
from patchpar.token_split.search import PlanSearch
from patchpar.token_split.shard import TokenShard
from patchpar.token_split.verify import verify_tokens
from patchpar.treatment import Treatment
from patchpar.verdicts import Verdicts

Forward = Callable[..., Any]
log = logging.getLogger(__name__)


class TokenDenoiser(SharedDenoiser):
    """A denoiser whose calls are computed by tokens. Every rank passes and gets whole tensors.

    `treatment` says which keys are attended to; one that uses those of the last step needs the `clock`. The plan is
    kept with the `verdicts`; without any, it is found anew and not verified. `reset` belongs before every picture,
    `finish` after it. `exchange` is "on", or wrong on purpose, as the negative control of tests and figures: "off"
    attends to own tokens only, "frozen" sends no keys after the exact steps.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        mesh: tuple[Door, Axis],
        treatment: Treatment,
        *,
        clock: StepClock | None = None,
        verdicts: Verdicts | None = None,
    ) -> None:
        super().__init__(denoiser, mesh, treatment, clock, verdicts)
        self.plan: TokenPlan | None = None
        self._shard: TokenShard | None = None
        self._ready: list[Any] = []  # forms of calls that have been seen
        self._choice = Choice(denoiser)
        self._search = PlanSearch(denoiser, mesh, verdicts)

    def denoise(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """One denoiser call; `forward` is the denoiser's own. Returns what it returns, for the whole picture.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError.
        """
        self._make_sure()
        before = self.watched.now() if self._shard is None else None
        output = self._denoised(forward, *args, **kwargs)
        if before is not None:
            self.watched.know(before)
        return output

    def _denoised(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        form = form_of((args, kwargs))
        with self._choice.set_aside() as kernel:
            first = self._shard is None or form not in self._ready
            if first:
                self._prepare(forward, (args, kwargs), kernel)
                self._ready.append(form)
            assert self._shard is not None
            self._shard.split = self._split(kernel)
            if self.history is None:
                self._this_step()
                output = self._shard.denoise(forward, *args, **kwargs)
            else:
                output = self._with_history(self.history, form, forward, *args, **kwargs)
            if first and self.share.place == 0:
                self._say_whose(self._shard)
            return output

    def _say_whose(self, shard: TokenShard) -> None:
        for name, shares in shard.shares.items():
            log.info("%s, %s: %s", type(self.denoiser).__name__, name, shares)

    # --- the first call of a form -------------------------------------------------------------------------------

    def _prepare(self, forward: Forward, call: Call, kernel: Kernel | None) -> None:
        """Know the tokens of such calls, and that splitting them changes nothing: another number is another matter."""
        refuse_caches(self.denoiser, stale=self.history is not None)
        refuse_elsewhere(self.denoiser, self.share.door.transport.device)
        with caches_set_aside(self.denoiser), needing_torch_attention(self.denoiser, kernel):
            self._know(forward, call)

    def _know(self, forward: Forward, call: Call) -> None:
        known = self.plan is not None
        if self._shard is None:
            self._take_up(self.plan or self._search.find(forward, call))
        try:
            self._check_or_extend(forward, call, known=known)
        except (UnsupportedModel, VerificationError) as error:  # all ranks alike
            if not self._search.second_hand:
                raise
            self._take_up(self._search.find_anew(forward, call, error))
            self._check(forward, call, known=False)

    def _check_or_extend(self, forward: Forward, call: Call, *, known: bool) -> None:
        try:
            self._check(forward, call, known=known)
        except NotWatched:  # every rank meets it at the same block
            assert self.plan is not None
            self._take_up(self.plan.joined(self._search.find(forward, call, otherwise=True)))
            self._check(forward, call, known=False)

    def _take_up(self, plan: TokenPlan) -> None:
        self.restore()
        self.plan, self._shard = plan, TokenShard(self.denoiser, plan, self._split())

    def _check(self, forward: Forward, call: Call, *, known: bool) -> None:
        """Verify, or where that is not wanted and the plan is of other calls, see whether it covers this one."""
        shard = self._shard
        assert shard is not None
        self._this_step()
        shard.split = self._split(wrong=False)
        try:
            if self.verdicts is not None:
                mesh = (self.share.door, self.share.axis)
                measure = partial(verify_tokens, shard, forward, [call])
                self.error = check_once(self.verdicts, self._facts(call), mesh, measure)
            elif known:
                shard.denoise(forward, *call[0], **call[1])
        except BaseException:
            self.restore()  # or the next call would find it split, and go ahead
            raise

    def _facts(self, call: Call) -> dict[str, Any]:
        """What the verdict depends on."""
        return {
            **made_of(self.denoiser),
            "tokens": str(self.plan),
            "strategy": self.share.treatment.name,
            "cut": cut_for(self.share.treatment),
            "places": self.share.axis.size,
            "device": self.share.door.transport.device.type,
            "arguments": arguments_of(call),
        }

    # --- every call ---------------------------------------------------------------------------------------------

    def _split(self, kernel: Kernel | None = None, *, wrong: bool | None = None) -> Split:
        share = self.share
        alone = self.exchange == "off" if wrong is None else wrong
        mode = None if alone else partial(attend_together, share.treatment.keys)
        gathers = share.treatment.keys == KeyExchange() or share.treatment.remembers
        cut = cut_for(share.treatment)
        return Split(share.door, share.axis, mode, share, kernel if gathers else None, cut)

    def _this_step(self) -> None:
        self.share.fresh, self.share.memory = True, None

    def _with_history(self, history: History, form: Any, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """With keys of the last step, where they are known and the treatment wants them."""
        assert self._shard is not None
        self._look_back(history, form, (args, kwargs))
        output = self._shard.denoise(forward, *args, **kwargs)
        history.memory.end()
        history.heard(self._told(history.tell()), fresh=self.share.fresh)
        return output

    def _told(self, own: list[Tensor]) -> list[list[Tensor]]:
        if not own:
            return []
        return [[told] for told in Gather(self.share.door, self.share.axis, "prediction", "drift").same(own[0])]

    def reset(self) -> None:
        """Begin a picture: nothing of the last one is used. Raises ExchangeError."""
        if self._shard is not None:
            self._shard.begin()
        super().reset()

    def _unlearn(self) -> None:
        self.plan, self._choice = None, Choice(self.denoiser)

    def restore(self) -> None:
        """Take the hooks out."""
        if self._shard is not None:
            self._shard.restore()
            self._shard = None
        self._ready.clear()
