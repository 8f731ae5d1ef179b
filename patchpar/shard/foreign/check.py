"""Foreign code in a network that is split: what it computes in a call is proved, or the call is compared.

    first call of a form    compared with the plain call; each function of torch that foreign code calls is tested
    later calls             the same functions: nothing more is done. Any other function: this call is compared too

So code that acts in some steps only, or by other numbers, is compared when it does. A function that is not proved to
mix no positions makes every call be compared. State that foreign code keeps is put back after each comparison.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import floats_in
from patchpar.errors import UnsupportedModel
from patchpar.shard.fingerprint import Fingerprint
from patchpar.shard.foreign.cuts import Cut
from patchpar.shard.foreign.functions import ForeignFunctions, FunctionCall
from patchpar.shard.foreign.holders import is_foreign
from patchpar.shard.foreign.kept_state import SavedState
from patchpar.shard.foreign.proof import is_local
from patchpar.shard.foreign.refusals import is_trusted, listed, untrusted, without_plain_call
from patchpar.shard.sdpa import TORCHS
from patchpar.shard.unsupported_model import is_out_of_memory
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

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedCall:
    """A call of a form that ranks compute together: as `split`, and `plain` for a comparison.

    `cuts`: how its tensors were divided; `exactly`: the split call to compare if `split` uses values of earlier steps;
    `shaken`: the plain call with a latent that is rounded otherwise, by a seed;
    `divides`: whether ranks have computed parts of the call, rather than some of several calls; `computes`: what each
    call is for, if calls of one step are for different things, between which nothing may be kept; `what` differs if it
    differs, `mixed` is what foreign code then mixes, and `way_out` is what to do, for messages.
    """

    form: Any
    split: Run
    plain: Run
    cuts: Callable[[], Sequence[Cut]]
    exactly: Run | None = None
    shaken: Callable[[int], Any] | None = None
    divides: Callable[[], bool] = lambda: True
    computes: str = ""
    what: str
    mixed: str
    way_out: str


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
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a kept tensor: it, and the plain call's
        self._refuted: set[tuple[FunctionCall, FunctionCall]] = set()  # of the plain call and of the split one
        self._before: SavedState | None = None  # of the running call
        self._made: dict[int, Tensor] = {}  # kept tensors of split calls that were not compared

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
            self._keep_track(before, after)
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

    def _compare(
        self, call: GuardedCall, own: list[FunctionCall], states: tuple[SavedState, SavedState], got: Any
    ) -> None:
        (before, after), cuts = states, list(call.cuts())
        twins, unknown = self._plain_tensors(before)
        before.put_back(twins)
        whole, want, failure = self._noted_or_none(call.plain, fails=unknown)
        plain_after = self._state()
        self._refuse_written(before)
        if call.exactly is not None:
            before.put_back()
            got = call.exactly()
        comparable = every_rank_has(self.mesh, "plain call", want is not None)
        found = self._judged(call, before, got, want) if comparable else Comparison(0.0, 1.0)
        after.put_back()
        self._pair(after, plain_after)
        self._learn(call.form, whole, own, cuts)
        if not comparable:
            fits = every_rank_has(self.mesh, "memory", failure is None or not is_out_of_memory(failure))
            raise without_plain_call(self.network, self.blamed, call.way_out, fits=fits)
        largest_error(self.mesh, [[found]], *self._blame(call))

    def _judged(self, call: GuardedCall, before: SavedState, got: Any, want: Any) -> Comparison:
        """Return the comparison. Its limit is the rounding of the dtype, or what that changes in this model."""
        error, limit = _comparison(got, want)
        for seed in range(ROUNDINGS):
            if call.shaken is None or every_rank_has(self.together, "error within its limit", error <= limit):
                break  # ranks make as many plain calls, each of which may take all of them
            before.put_back()
            limit = max(limit, SHAKEN * _comparison(call.shaken(seed), want).error)
        return Comparison(error, limit)

    def _noted_or_none(self, plain: Run, *, fails: bool) -> tuple[list[FunctionCall], Any, Exception | None]:
        """Return what `_noted` does; no output, but the error, for want of memory, or where the call may fail."""
        try:
            return *self._noted(plain), None
        except Exception as error:
            if not (is_out_of_memory(error) or (fails and isinstance(error, (RuntimeError, ValueError, IndexError)))):
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

    def _noted(self, run: Run) -> tuple[list[FunctionCall], Any]:
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

    def _learn(self, form: Any, whole: list[FunctionCall], own: list[FunctionCall], cuts: Sequence[Cut]) -> None:
        """Prove the functions of a call that were not known. A form counts only where both calls ran the same ones."""
        whole = _without_attention(whole, own)
        alike = len(whole) == len(own) and all(x.function is y.function for x, y in zip(whole, own, strict=True))
        self._forms = [each for each in self._forms if each[0] != form] + [(form, alike)]
        if not alike:
            return
        pairs = set(zip(whole, own, strict=True))
        self._refuted |= {pair for pair in pairs - self._refuted if not is_local(*pair, cuts, self._device)}
        self._proved |= {y for _, y in pairs} - {y for _, y in self._refuted}

    # --- tensors that foreign code keeps: those of the split call, and those that the plain call would have -----------

    def _plain_tensors(self, before: SavedState) -> tuple[dict[int, Tensor], bool]:
        """Return what the plain call finds for tensors of split calls, and whether any is unknown: it gets NaN."""
        twins, unknown = dict[int, Tensor](), False
        for x in before.tensors.values():
            if id(x) in self._twins:
                twins[id(x)] = self._twins[id(x)][1]
            elif id(x) in self._made:
                unknown = True
                twins[id(x)] = torch.full_like(x, torch.nan) if x.is_floating_point() else x
        return twins, unknown

    def _pair(self, after: SavedState, plain_after: SavedState) -> None:
        """Note which tensor the plain call has kept where the split call has kept its own."""
        pairs = ((x, plain_after.tensors.get(path)) for path, x in after.tensors.items())
        self._twins = {id(x): (x, twin) for x, twin in pairs if twin is not None and twin is not x}
        kept = {id(x) for x in after.tensors.values()}
        self._made = {key: x for key, x in self._made.items() if key in kept and key not in self._twins}

    def _keep_track(self, before: SavedState, after: SavedState) -> None:
        """Note tensors that a call has kept without a comparison."""
        was, kept = ({id(x): x for x in state.tensors.values()} for state in (before, after))
        self._made = {key: x for key, x in kept.items() if key not in was or key in self._made}
        self._twins = {key: pair for key, pair in self._twins.items() if key in kept}


def _without_attention(whole: list[FunctionCall], own: list[FunctionCall]) -> list[FunctionCall]:
    """Return the functions of the plain call but those of attention that ranks compute together in the split one."""
    found, mine = list[FunctionCall](), iter(own)
    expected = next(mine, None)
    for call in whole:
        if call.function is TORCHS and (expected is None or expected.function is not TORCHS):
            continue
        found.append(call)
        expected = next(mine, None)
    return found


def _comparison(got: Any, want: Any) -> Comparison:
    pairs = list(zip(floats_in(got), floats_in(want), strict=True))
    return Comparison(max(relative_error(x, y) for x, y in pairs), rounding_limit(y for _, y in pairs))
