"""The ratio of a plan, from a short run: some denoiser calls of the same call on each rank alone, all at the same time.

A rank's predictions come to the caller when its device has computed them, so that what is timed is the device, on GPUs
too. Between the first and the last of NUM_CALLS predictions nothing is loaded or verified any more. Parts of the image
are in proportion to speeds; ranks with the same part, one for each guidance branch, count as the slowest of them. Ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from patchpar.errors import CallCancelled, PlanError
from patchpar.pipeline.call_journal import CallJournal
from patchpar.pipeline.caller import CallController, RankEvent
from patchpar.pipeline.messages import RecordedPrediction
from patchpar.pipeline.suspended_call import restore_states, states_of
from patchpar.plan.mesh import Mesh
from patchpar.plan.part_ratio import ratio_of
from patchpar.plan.plan import Plan

NUM_CALLS = 5


class TimedCalls(CallController):
    """A call on one rank whose first predictions are timed. `clock`: seconds."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def begin_alone(self) -> None:
        """Prepare: with a seed of its own, so that torch's default generator does not move on."""
        self.times: list[float] = []
        self.resume(CallJournal(), 0, [])
        self.go_apart()

    @property
    def has_enough(self) -> bool:
        """Whether the call need not go on."""
        return len(self.times) >= NUM_CALLS

    def _keep(self, rank: int, event: RankEvent) -> None:
        if isinstance(event, RecordedPrediction) and not self.has_enough:
            self.times.append(self.clock())
        super()._keep(rank, event)


def measured_seconds(
    run_alone: Callable[[CallController, int], object], caller: CallController, ranks: Sequence[int]
) -> dict[int, float]:
    """Return the seconds of a denoiser call on each of `ranks`. `run_alone` makes a call on one rank, in this thread.

    Raises PlanError where predictions are not recorded, and what the call raises.
    """
    kwargs = {name: value for name, value in caller.bound.items() if name != "callback_on_step_end"}
    states = states_of(kwargs)
    timed = {rank: caller.alone(TimedCalls, kwargs) for rank in ranks}
    errors: list[Exception] = []

    def run(rank: int) -> None:
        timed[rank].begin_alone()
        try:
            run_alone(timed[rank], rank)
        except CallCancelled:
            pass
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name="patchpar-speed") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    restore_states(kwargs, states)
    if errors:
        raise errors[0]
    return {rank: seconds_of(found.times) for rank, found in timed.items()}


def seconds_of(times: Sequence[float]) -> float:
    """Return the seconds of a call from those at which calls were over. Raises PlanError for fewer than two."""
    if len(times) < 2:
        raise PlanError(
            f"ratio=measured: {len(times)} denoiser calls could be timed, since the call has no more, or its "
            f"predictions are not recorded: give numbers, as in ratio=3:1"
        )
    return max(median(after - before for before, after in pairwise(times)), 1e-9)


def with_measured_ratio(plan: Plan, ranks: Sequence[int], seconds: Mapping[int, float]) -> tuple[Plan, str]:
    """Return the plan on `ranks` with a ratio in numbers, and the reason for it; `seconds` of a call by rank."""
    slowest = [0.0] * plan.patch
    for rank in ranks:
        part = Mesh(rank, ranks, **plan.degrees())["patch"].rank
        slowest[part] = max(slowest[part], seconds[rank])
    found = replace(plan, ratio=ratio_of([1 / each for each in slowest]))
    note = ", ".join(f"{each:.3g}" for each in slowest)
    return found, f"parts as measured: a call takes {note} s on the ranks alone"
