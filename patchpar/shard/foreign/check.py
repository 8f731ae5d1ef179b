"""Foreign code in a network that is split: what it computes in a call is proved, or the call is compared.

    first call of a form    compared with the plain call; each function of torch that foreign code calls is tested
    later calls             the same functions: nothing more is done. Any other function: this call is compared too

So code that acts in some steps only, or by other numbers, is compared when it does. A function that is not proved to
mix no positions makes every call be compared. State that foreign code keeps is put back after each comparison.
Where the plain call does not fit in the memory of every rank, a smaller one is compared in its place, if foreign code
does the same in both.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import floats_in
from patchpar.errors import UnsupportedModel
from patchpar.shard.fingerprint import Fingerprint
from patchpar.shard.foreign.functions import ForeignFunctions, FunctionCall
from patchpar.shard.foreign.guarded_call import GuardedCall, Run
from patchpar.shard.foreign.holders import is_foreign
from patchpar.shard.foreign.kept_state import SavedState
from patchpar.shard.foreign.proof import is_local
from patchpar.shard.foreign.refusals import OTHER_WORK, TOO_LARGE, is_trusted, listed, untrusted, without_plain_call
from patchpar.shard.foreign.same_work import are_alike, are_same, enlarged, without_attention
from patchpar.shard.foreign.state_tensors import StateTensors
from patchpar.shard.unsupported_model import is_of_the_split, is_out_of_memory
from patchpar.shard.verification import (
    ROUNDINGS,
    SHAKEN,
    Comparison,
    Forward,
    every_rank_has,
    largest_error,
    relative_error,
    rounding_limit,
    uncounted,
)
from patchpar.shard.verification_cache import VerificationCache

Functions = list[FunctionCall]
Pair = tuple[FunctionCall | None, FunctionCall]  # of the plain call, if it is known, and of the split one
States = tuple[SavedState, SavedState]  # before and after the split call


class ForeignCheck:
    """Sees to it that foreign code in a split network computes what it computes in the plain one.

    `look` before calls, after the network may have changed; all ranks of the axis call `run` together. `names`: what
    is foreign and not trusted. `is_paused`: whether calls are a comparison by an inner layer, of which nothing counts.
    """

    def __init__(
        self,
        network: nn.Module,
        mesh: AxisComm,
        verifications: VerificationCache | None,
        is_paused: Callable[[], bool] = bool,
    ) -> None:
        self.network, self.mesh, self.verifications = network, mesh, verifications
        self.names: tuple[str, ...] = ()
        self.is_comparing = False
        self.together = mesh
        """All ranks that a plain call takes, at least those of the mesh."""
        self._device = mesh[0].transport.device
        self._is_paused, self._all = is_paused, tuple[str, ...]()
        self._forms: list[tuple[Any, bool]] = []  # of calls that were compared, and whether others need not be
        self._proved: set[FunctionCall] = set()
        self._refuted: set[Pair] = set()
        self._before: SavedState | None = None  # of the running call
        self._kept = StateTensors()

    def look(self, found: Fingerprint) -> None:
        """Learn which foreign code there is; what is known of calls so far does not count any more."""
        self._all = found.foreign
        self.names = untrusted(found, self.verifications)
        self._forms.clear()
        self._proved.clear()
        self._refuted.clear()

    @contextmanager
    def set_aside(self, forward: Forward) -> Iterator[Forward]:
        """Context of calls for their own sake. Yields a forward that finds what foreign code kept before all of them.

        Afterwards that is put back. Raises UnsupportedModel where it cannot be.
        """
        if not self._all:
            yield forward
            return
        before = self._state()

        def from_before(*args: Any, **kwargs: Any) -> Any:
            self._refuse_written(before)
            before.put_back()
            return forward(*args, **kwargs)

        yield from_before
        self._refuse_written(before)
        before.put_back()

    def run(self, call: GuardedCall) -> Any:
        """Return the output of the split call. Raises VerificationError, UnsupportedModel, ExchangeError."""
        compared = any(form == call.form for form, _ in self._forms)
        if not self.is_needed or (compared and not self.names):  # trusted code does the same in every call
            return call.split()
        self._before = before = self._state()
        own, output = self._noted(call.split)
        divides = call.divides()
        if self.names and (call.computes or not divides):
            self._refuse_changed(before, call)
        if not divides:
            return output
        known = (call.form, True) in self._forms and self._proved.issuperset(own)
        after = self._state()
        if every_rank_has(self.mesh, "foreign code", known):
            self._kept.note(before, after)
            return output
        self.is_comparing = True
        try:
            with uncounted(self.mesh[0]), torch.no_grad():
                self._compare(call, own, (before, after), output)
        finally:
            self.is_comparing = False
        return output

    def rewind(self) -> None:
        """Put the state back to that before the split call, which begins again."""
        if self._before is not None:
            self._before.put_back()

    def _compare(self, call: GuardedCall, own: Functions, states: States, got: Any) -> None:
        before, after = states
        twins, unknown = self._kept.for_plain_call(before)
        before.put_back(twins)
        whole, want, failure = self._noted_or_none(call.plain, fails=unknown)
        plain_after = self._state()
        self._refuse_written(before)
        if not every_rank_has(self.together, "memory", failure is None or not is_out_of_memory(failure)):
            del want
            self._compare_smaller(call, own, states, depends=bool(twins) or unknown)
            return
        if call.exactly is not None:
            before.put_back()
            got = call.exactly()
        comparable = every_rank_has(self.together, "plain call", want is not None)
        found = self._judged(call, before, got, want) if comparable else Comparison(0.0, 1.0)
        after.put_back()
        self._kept.pair(after, plain_after)
        whole = without_attention(whole, own)
        self._learn(call, zip(whole, own, strict=False), are_same(whole, own))
        if not comparable:
            raise without_plain_call(self.network, self.blamed, call.way_out)
        largest_error(self.mesh, [[found]], *self._blame(call))

    def _compare_smaller(self, call: GuardedCall, own: Functions, states: States, *, depends: bool) -> None:
        """Compare the largest smaller call that fits. `depends`: on tensors of earlier calls, of the size of these."""
        before, after = states
        found = None if depends else self._smaller(call, before)
        if found is None:
            after.put_back()
            raise without_plain_call(self.network, self.blamed, call.way_out, TOO_LARGE[depends])
        smaller, whole, want = found
        before.put_back()
        smaller_own, got = self._noted(smaller.split)
        compared = self._judged(smaller, before, got, want)
        after.put_back()
        self._kept.note(before, after)
        does_the_same = self._learn_from_smaller(call, own, whole, smaller_own)
        largest_error(self.mesh, [[compared]], *self._blame(call))
        if not every_rank_has(self.mesh, "the same in a smaller call", does_the_same):
            raise without_plain_call(self.network, self.blamed, call.way_out, OTHER_WORK)

    def _smaller(self, call: GuardedCall, before: SavedState) -> tuple[GuardedCall, Functions, Any] | None:
        """Return the largest smaller call that every rank can run plainly, with its functions and its output."""
        for each in call.smaller():
            before.put_back()
            whole, want, _ = self._noted_or_none(each.plain, fails=True)
            if every_rank_has(self.together, "memory of fewer tokens", want is not None):
                return each, whole, want
        return None

    def _judged(self, call: GuardedCall, before: SavedState, got: Any, want: Any) -> Comparison:
        """Return the comparison. Its limit is the rounding of the dtype, or what that changes in this model."""
        error, limit = _comparison(got, want)
        for seed in range(ROUNDINGS):
            if call.shaken is None or every_rank_has(self.together, "error within its limit", error <= limit):
                break  # ranks make as many plain calls, each of which may take all of them
            before.put_back()
            limit = max(limit, SHAKEN * _comparison(call.shaken(seed), want).error)
        return Comparison(error, limit)

    def _noted_or_none(self, plain: Run, *, fails: bool) -> tuple[Functions, Any, Exception | None]:
        """Return what `_noted` does; no output, but the error, for want of memory, or where the call may fail."""
        try:
            return *self._noted(plain), None
        except Exception as error:
            if not (is_out_of_memory(error) or (fails and is_of_the_split(error))):
                raise
            return [], None, error.with_traceback(None)  # whose frames keep tensors

    @property
    def blamed(self) -> str:
        """What names the foreign code in messages."""
        return listed(self.names or self._all)

    @property
    def suspected(self) -> str:
        """What names a network that fails in messages, with the foreign code in it, if there is any."""
        found = self.blamed
        return f"This model, or {found[0].lower()}{found[1:]}," if self._all else "This model"

    @property
    def is_needed(self) -> bool:
        """Whether the network holds foreign code, and calls are compared at all."""
        return bool(self._all) and self.verifications is not None

    def _state(self) -> SavedState:
        return SavedState(self.network, self._device)

    def _noted(self, run: Run) -> tuple[Functions, Any]:
        """Return the functions that untrusted foreign code called in a run, and its output."""
        counts = ForeignFunctions(self.network, self._counts, self._is_paused)
        with counts:
            output = run()
        return counts.calls, output

    def _counts(self, module: str) -> bool:
        return is_foreign(module) and not is_trusted(module, self.verifications)

    def _refuse_written(self, before: SavedState) -> None:
        if before.has_written_tensors:
            raise UnsupportedModel(
                f"{self.blamed} writes into tensors that it keeps from one call to the next, which cannot be put back "
                "after a comparison with the plain call: let it keep new tensors instead, or use one device"
            )

    def _blame(self, call: GuardedCall) -> tuple[str, str]:
        """Return what differs from the plain model, and what follows the figures, for messages."""
        return call.what, f". {self.blamed} mixes {call.mixed} in a way patchpar does not know: {call.way_out}"

    def _refuse_changed(self, before: SavedState, call: GuardedCall) -> None:
        if before.has_changed:
            reason = f"each rank makes only some of the calls of {call.what}"
            if call.computes:
                reason = f"each call of {call.what} is for {call.computes}, and each rank makes only some of them"
            raise UnsupportedModel(
                f"{self.blamed} keeps something from one call to the next, but {reason}: {call.way_out}"
            )

    def _learn(self, call: GuardedCall, pairs: Iterable[Pair], alike: bool) -> None:
        """Prove the functions of a call that were not known. A form counts only where both calls ran the same ones."""
        self._forms = [each for each in self._forms if each[0] != call.form] + [(call.form, alike)]
        if not alike:
            return
        found, cuts = set(pairs), list(call.cuts())
        self._refuted |= {
            (plain, own)
            for plain, own in found - self._refuted
            if plain is None or not is_local(plain, own, cuts, self._device)
        }
        self._proved |= {y for _, y in found} - {y for _, y in self._refuted}

    def _learn_from_smaller(self, call: GuardedCall, own: Functions, whole: Functions, smaller_own: Functions) -> bool:
        """Prove the functions of a call by those of a smaller one; return whether it stands for the call."""
        whole, cuts = without_attention(whole, smaller_own), list(call.cuts())
        if not are_same(smaller_own, own):
            return False
        alike = are_same(whole, own)
        triples = zip(whole, smaller_own, own, strict=True) if alike else ()
        self._learn(call, [(enlarged(*each, cuts), each[-1]) for each in triples], alike)
        return self._proved.issuperset(own) or are_alike(smaller_own, own)


def _comparison(got: Any, want: Any) -> Comparison:
    pairs = list(zip(floats_in(got), floats_in(want), strict=True))
    return Comparison(max(relative_error(x, y) for x, y in pairs), rounding_limit(y for _, y in pairs))
