"""Base of denoisers that ranks compute together, in bands or by tokens: the local patch, stale state, start and end.

And a denoiser that this rank computes alone, whose steady steps are captured as graphs of the device and replayed.
"""

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import nn

from patchpar.comm.collectives import AxisComm
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.step_clock import StepClock
from patchpar.shard.fingerprint import Fingerprint
from patchpar.shard.foreign.check import ForeignCheck
from patchpar.shard.graphs.step_graphs import Stateless, StepGraphs
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.stale.extrapolation import timestep_of
from patchpar.shard.stale.state import StaleState
from patchpar.shard.verification import every_rank_has
from patchpar.shard.verification_cache import VerificationCache
from patchpar.shard.watched_network import NetworkRecord, WatchedNetwork

EARLIER = 16
"""So many states of a network, such as its adapters in turn, are known again when it comes back to them."""


@dataclass(eq=False, repr=False)
class SharedDenoiser:
    """A denoiser whose calls ranks compute together. Every rank passes and gets whole tensors.

    `policy` defines what is exchanged and when; one with stale values needs the `clock`. Call `reset` before every
    image and `finish` after it. `exchange` is "on", or wrong on purpose, as the negative control of tests and figures:
    "off" computes every part alone, "frozen" sends nothing after the exact steps. `error`: relative error of the
    verification at first use. `unsure`: the denoiser may have been changed since the last call. `graphs`: captures
    steady steps and replays them, if there is any; see `use_graphs`.
    """

    denoiser: nn.Module
    mesh: AxisComm
    policy: ExchangePolicy
    _: KW_ONLY
    clock: StepClock | None = None
    verifications: VerificationCache | None = None
    _learns: ClassVar[str]
    """Name of the attribute with what is found out about the denoiser, which `_unlearn` discards."""
    _holds_for_all_plans: ClassVar[bool] = False
    """Whether that is the same for any number of ranks and any policy."""

    def __post_init__(self) -> None:
        self.patch = LocalPatch(*self.mesh, self.policy)
        self.error: float | None = None
        self.exchange = "on"
        self.ignored = frozenset[str]()
        """Names of arguments whose numbers and texts may differ from call to call without another verification."""
        self.history = StaleState(self.mesh[0], self.policy, self.clock) if self.policy.remembers else None
        self.watched, self.unsure = WatchedNetwork(self.denoiser), False
        self._earlier: deque[tuple[NetworkRecord, Any]] = deque(maxlen=EARLIER)
        self.foreign = ForeignCheck(self.denoiser, self.mesh, self.verifications)
        self.graphs: StepGraphs | None = None
        self._parameters = tuple(inspect.signature(type(self.denoiser).forward).parameters)[1:]

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens of all ranks in the running call, as far as it has come; none in bands."""
        return ()

    @property
    def together(self) -> AxisComm:
        """All ranks that a plain call takes, at least those of the mesh: they make as many of them."""
        return self.foreign.together

    @together.setter
    def together(self, ranks: AxisComm) -> None:
        self.foreign.together = ranks

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Capture steady steps and replay them. What is sent for the next step is received by the end of the call."""
        self.graphs = graphs
        if self.history is not None:
            self.history.cache.joins = True

    def reset(self) -> None:
        """Begin an image: no value of the last one is used. Raises ExchangeError."""
        self.unsure = True
        if self.history is not None:
            self.history.reset()

    def finish(self) -> None:
        """End an image: wait for pending exchanges. Raises ExchangeError."""
        if self.history is not None:
            self.history.cache.settle()

    def forget(self) -> None:
        """Remove the hooks and discard what is known; the next call discovers anew, so modules may change meanwhile."""
        self._drop_graphs("the denoiser may change")
        self.restore()
        self.watched.forget()
        self._unlearn()
        self._earlier.clear()
        if self.history is not None:
            self.history.cache.settle()
            self.history = self.history.anew()

    @property
    def known_states(self) -> tuple[tuple[NetworkRecord, Any], ...]:
        """States of the denoiser and what was found out about each, as far as it holds for all plans."""
        if not self._holds_for_all_plans:
            return ()
        latest = () if self.watched.latest is None else ((self.watched.latest, getattr(self, self._learns)),)
        return (*self._earlier, *latest)

    def know(self, states: Iterable[tuple[NetworkRecord, Any]]) -> None:
        """Take over `known_states` of the same denoiser with another plan."""
        if self._holds_for_all_plans:
            self._earlier.extend(states)

    def discard(self) -> None:
        """Discard what a failed call has left: values of steps before it, and messages that nobody waits for now."""
        self._drop_graphs("a call has failed")
        self.restore()
        if self.history is not None:
            self.history = self.history.anew()

    def _look(self) -> Fingerprint:
        """Return the fingerprint of a network that is not known yet, whose foreign code is known from now on."""
        before = self.watched.now()
        self.foreign.look(before)
        if self._holds_for_all_plans and not getattr(self, self._learns):
            known = (copy(found) for record, found in self._earlier if record.describes(before))
            setattr(self, self._learns, next(known, getattr(self, self._learns)))
        return before

    def _make_sure(self) -> None:
        """Set aside what is known of the denoiser if it has changed; take up what is known of its state now."""
        if self.unsure and self.graphs is not None:
            self.graphs.look_at_network()
        if self.unsure and self.watched.has_changed:
            self._drop_graphs("the denoiser has changed")
            self._take_up_state()
            if self.history is not None:
                self.history.lose()
        self.unsure = False

    def _take_up_state(self) -> None:
        assert self.watched.latest is not None
        self._earlier.append((self.watched.latest, getattr(self, self._learns)))
        self.restore()
        self.watched.forget()
        self._unlearn()
        now = self.watched.now()
        found = next((entry for entry in self._earlier if entry[0].describes(now)), None)
        if found is not None:  # verified in that state, which the cache of results remembers
            self._earlier.remove(found)
            self.watched.know_again(found[0])
            setattr(self, self._learns, found[1])

    def _steady(self, kind: Hashable | None, step: Callable[..., Any], call: tuple[Any, Any]) -> Any:
        """Return the output of `step` for a call. `kind`: of a step like others, which may be a graph; else None."""
        state = Stateless() if self.history is None else self.history.cache
        if self.graphs is not None and kind is None:
            self.graphs.release(state)
        if self.graphs is None or kind is None or self.exchange != "on":
            return step(*call[0], **call[1])
        return self.graphs.run(kind, step, call, state)

    @property
    def _exact_kind(self) -> Hashable | None:
        """Kind of a step without stale values; None for the first of an image, in which grids of tokens are found."""
        return None if self.clock is None or self.clock.evaluation == 0 else ("exact",)

    def _drop_graphs(self, reason: str = "") -> None:
        if self.graphs is not None:
            self.graphs.clear(reason)

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Returns its output for the whole image."""
        raise NotImplementedError

    def prepare(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Find how such a call is divided, and verify it, unless it is known; `forward` is the denoiser's own."""
        raise NotImplementedError

    def exactly(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole image of a call that is prepared, with fresh values everywhere."""
        raise NotImplementedError

    def restore(self) -> None:
        """Leave the denoiser as it was. Idempotent."""
        raise NotImplementedError

    def _unlearn(self) -> None:
        raise NotImplementedError

    def _look_back(self, history: StaleState, form: Any, call: tuple[Any, Any]) -> None:
        """Set up the stale values of this call; `form` is what must not change from one step to the next."""
        patch, form = self.patch, (form, history.clock.branches)  # the number of branches changes the form
        if self.graphs is not None and history.is_another(form):
            history.cache.parks = every_rank_has(self.mesh, "memory of calls of two forms", history.has_room_beside)
        patch.fresh = history.begin(form, call)
        patch.step_ratio = history.step_ratio(timestep_of(self._parameters, *call))
        patch.cache, patch.frozen = history.cache, self.exchange == "frozen"


class WholeDenoiser(SharedDenoiser):
    """A denoiser on a mesh of one rank. Nothing is divided or exchanged; without graphs its calls run as they are."""

    _learns: ClassVar[str] = "error"

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Returns its output."""
        self._make_sure()
        if self.watched.latest is None:
            self.watched.record(self.watched.now())
        return self._steady(self._exact_kind, forward, (args, kwargs))

    def prepare(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to verify."""

    def exactly(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a call."""
        return forward(*args, **kwargs)

    def restore(self) -> None:
        """Do nothing: the denoiser has no hooks of this object."""

    def _unlearn(self) -> None:
        pass
