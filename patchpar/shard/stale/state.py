"""Whether a denoiser call is exact or uses stale values: warm-up, missed steps, resynchronisation, other arguments."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError
from patchpar.launch.accelerators import free_bytes
from patchpar.plan.exchange_policy import CachedPartials, ExchangePolicy, StaleKV
from patchpar.plan.resync import ResyncDecider
from patchpar.plan.step_clock import StepClock
from patchpar.shard.host_memory import HostCopy
from patchpar.shard.stale.cache import StaleCache
from patchpar.shard.stale.extrapolation import StepExtrapolator

MOST_PARKED_BYTES = 0.1  # of free memory, that values of other forms may take
_Argument = tuple["ref[Tensor]", bool]  # of the last evaluation, and whether it was that of the one before too


class StaleState:
    """Stale values of one denoiser, and the decision in which calls they may be used. Raises PlanError."""

    def __init__(self, comm: Communicator, policy: ExchangePolicy, clock: StepClock | None) -> None:
        if clock is None:
            raise PlanError(f"strategy {policy.name!r} uses stale values, so it needs the step clock: pass clock=")
        self.comm, self.policy, self.clock = comm, policy, clock
        self.cache = StaleCache(comm, policy.bucket)
        self.cache.measures_drift = policy.resync is not None
        self.exact_calls, self.stale_calls = 0, 0
        self._deciders: dict[int, ResyncDecider] = {}
        self._reports: defaultdict[int, list[_Report]] = defaultdict(list)  # by call: those not decided upon yet
        self._stale_in_a_row: Counter[int] = Counter()  # by call
        self._sent_before = 0
        self._extrapolator, self._constants = StepExtrapolator(), ConstantArguments()
        self._ratio = torch.zeros((), device=comm.transport.device)
        self._known_ratio: float | None = 0.0  # None where only the device knows it

    def anew(self) -> "StaleState":
        """Return an empty state of the same denoiser, which waits for nothing that is pending."""
        found = StaleState(self.comm, self.policy, self.clock)
        found.cache.joins = self.cache.joins
        return found

    def reset(self) -> None:
        """Begin an image."""
        self.lose()
        self.exact_calls, self.stale_calls = 0, 0

    def lose(self) -> None:
        """Discard the values of all steps so far."""
        self.cache.reset()
        self._deciders.clear()
        self._reports.clear()
        self._stale_in_a_row.clear()
        self._extrapolator.reset()
        self._constants.reset()

    def step_ratio(self, timestep: Any) -> Tensor:
        """Return the length of this step over that of the last, as `StepExtrapolator.step_ratio` does.

        The same scalar in fp32 on the device in every step, so that a recorded step finds it; 0 where the policy does
        not extrapolate. `timestep` is a number or a tensor of any shape.
        """
        context = self.policy.context
        if isinstance(context, StaleKV) and context.extrapolated:
            ratio = self._extrapolator.step_ratio(self.clock.evaluation, timestep)
            if isinstance(ratio, Tensor):
                self._ratio.copy_(ratio, non_blocking=True)
                self._known_ratio = None
            elif ratio != self._known_ratio:
                self._known_ratio = ratio
                self._ratio.fill_(ratio)
        return self._ratio

    def is_another(self, form: Any) -> bool:
        """Whether the call that begins now last had another form. The same on all ranks."""
        return self.cache.is_another(max(0, self.clock.call), form)

    @property
    def has_room_beside(self) -> bool:
        """Whether this rank has memory for values of another form beside those that it keeps."""
        free = free_bytes(self.comm.transport.device)
        return free is None or self.cache.num_bytes().total <= MOST_PARKED_BYTES * free

    def begin(self, form: Any, arguments: tuple[Any, Any] = ((), {})) -> bool:
        """Begin a denoiser call; return whether it is exact. `form`: what must not change from one step to the next.

        `arguments`: args and kwargs; where those change that were the same in each step, it is another call than last.
        """
        call, clock = max(0, self.clock.call), self.clock
        is_another = self._constants.have_changed(call, arguments)
        usable = self.cache.begin(call, clock.evaluation, form)
        self.cache.calls_left = clock.calls_left
        assert self.policy.warmup_steps is not None
        fresh = not usable or clock.step < self.policy.warmup_steps or self._is_to_be_fresh(call) or is_another
        self.exact_calls, self.stale_calls = self.exact_calls + fresh, self.stale_calls + (not fresh)
        self._stale_in_a_row[call] = 0 if fresh else self._stale_in_a_row[call] + 1
        self._sent_before = self.comm.traffic.total_bytes
        return fresh

    @property
    def steady_kind(self) -> Hashable | None:
        """Which kind of steady step the call that has begun is; None for one that is unlike those that follow.

        The first stale step reads what an exact one has stored, elsewhere than stale steps store it.
        """
        call, context = max(0, self.clock.call), self.policy.context
        if self._stale_in_a_row[call] <= 1:
            return None
        refresh = context.refresh if isinstance(context, CachedPartials) else 1  # layers are refreshed in turn
        return ("stale", f"call {call}", f"turn {self.clock.evaluation % refresh}")

    def report(self, still_to_send: int = 0) -> list[Tensor]:
        """Return what all ranks need to decide on the next call: [3], two sums of drift, and bytes sent; or nothing.

        `still_to_send`: bytes of this call that are sent with the report.
        """
        if self.policy.resync is None:
            return []
        drift = self.cache.drift
        sent = float(self.comm.traffic.total_bytes - self._sent_before + still_to_send)
        return [torch.cat([drift, torch.full((1,), sent, device=drift.device)])]  # filled in without a copy to the GPU

    def receive(self, gathered: Sequence[Sequence[Tensor]], *, fresh: bool) -> None:
        """Receive what `report` returned on each rank for this call: [3] from each.

        On a GPU the values come to the host while it goes on, and are waited for in `begin` of the next evaluation.
        """
        if self.policy.resync is not None:
            values = HostCopy(torch.stack([of_rank[0] for of_rank in gathered]))
            self._reports[max(0, self.clock.call)].append(_Report(values=values, fresh=fresh))

    def _is_to_be_fresh(self, call: int) -> bool:
        """Decide whether this evaluation of a call is exact, after the reports on earlier ones."""
        rules, wanted = self.policy.resync, False
        for report in self._reports.pop(call, []):
            assert rules is not None
            values = report.values.wait()
            moved, whole, _ = values.sum(0).tolist()
            drift = (moved / whole) ** 0.5 if whole > 0 else 0.0
            decider = self._deciders.setdefault(call, ResyncDecider(rules))
            sent, calls = values[:, 2].max().item(), len(self._stale_in_a_row)
            wanted = decider.next_is_fresh(drift, sent, fresh=report.fresh, calls=calls)
        return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What all ranks report of one call: `values` [ranks, 3], two sums of drift, and bytes sent."""

    values: HostCopy
    fresh: bool


class ConstantArguments:
    """The tensors that each call of a step has been given so far, known by identity: values are not read.

    A pipeline may call the denoiser without the prompt and then with it, and in later steps with it alone: the first
    call of the step is then another one. Programs are the same on all ranks, and so is what is found.
    """

    def __init__(self) -> None:
        self._last: dict[int, dict[Hashable, _Argument]] = {}

    def have_changed(self, call: int, arguments: tuple[Any, Any]) -> bool:
        """Whether an argument that was the same tensor in the last two evaluations of a call is another one now.

        `arguments`: args and kwargs, of which tensors and lists of tensors count. In every denoiser call, so that it
        makes no further calls of Python.
        """
        args, kwargs = arguments
        found: list[tuple[Hashable, Any]] = [*enumerate(args), *kwargs.items()]
        for path, x in found.copy():
            if isinstance(x, list):
                for number, each in enumerate(x):
                    found.append(((path, number), each))
        last, now, changed = self._last.get(call, {}), dict[Hashable, _Argument](), False
        for path, x in found:
            if isinstance(x, Tensor):
                before = last.get(path)
                is_same = before is not None and before[0]() is x
                changed |= before is not None and before[1] and not is_same
                now[path] = ref(x), is_same
        self._last[call] = now
        return changed

    def reset(self) -> None:
        """Begin an image."""
        self._last.clear()
