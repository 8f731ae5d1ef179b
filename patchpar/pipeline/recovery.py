"""How a job goes on after a failure of its ranks: with which plan, and on which of them.

a worker died or hung       those that are left make the call again from the journal, with the plan for so many;
                            if none is left, or ranks hold parts of one model: new workers, with the same plan;
                            new ones that die while they load the model are lost as well
a device lacks memory       once: with a plan for more ranks, or while decoding in tiles; nobody has died
a record does not fit       the same plan, from the first denoiser call on

The next call on a rank that was lost starts a new worker for it. Ours: systems that serve diffusion models fail the
request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from patchpar.errors import (
    LaunchError,
    PlanError,
    ReplayMismatch,
    RetriesExhausted,
    WorkerDied,
    WorkerError,
    WorkerHung,
    WorkerOutOfMemory,
)
from patchpar.launch.remote_errors import is_out_of_memory
from patchpar.pipeline.call_placement import CallPlacement
from patchpar.plan.plan import Plan
from patchpar.strategies.structure.options import StructureGuidance

if TYPE_CHECKING:
    from patchpar.pipeline.caller import CallController
    from patchpar.pipeline.state import PipelineState

MISMATCH = "patchpar.errors.ReplayMismatch"
TILED = "tiled"
GB = 1e9
NextAttempt = tuple[Plan, tuple[int, ...], str]
log = logging.getLogger(__name__)


class Recovery:
    """Of one job. `retries`: how often it was made again after it had lost a worker."""

    def __init__(self, state: PipelineState, caller: CallController, placement: CallPlacement) -> None:
        self._state, self._caller, self._placement = state, caller, placement
        self.retries = 0
        self._has_lacked_memory = False

    def after(self, error: Exception, plan: Plan, ranks: tuple[int, ...]) -> NextAttempt:
        """Return plan, ranks and the reason for them (empty: as before) of another attempt after one with these.

        Raises the error if there is no other attempt, RetriesExhausted if there have been as many as there may be, and
        WorkerOutOfMemory, with what is free. A plain call, which keeps no journal, has no other attempt.
        """
        if self._caller.journal is None:
            if isinstance(error, WorkerOutOfMemory) and self._state.ranks.kind == "local":
                raise self._lacked_memory(error, ranks, self._free_memory(ranks)) from error
            raise error
        if isinstance(error, ReplayMismatch) or getattr(error, "cause", "") == MISMATCH:
            return self._from_the_start(error, plan, ranks)
        if isinstance(error, WorkerOutOfMemory) or is_out_of_memory(error):
            return self._with_more_memory(error, plan, ranks)
        if _has_lost_workers(error) and self._placement.max_retries:
            return self._on_other_workers(error, plan, ranks)
        raise error

    def refuse(self, error: Exception, plan: Plan, ranks: tuple[int, ...]) -> None:
        """Raise WorkerOutOfMemory if the plan that cannot be run is the one that was to take less memory."""
        if self._has_lacked_memory:
            self._with_more_memory(error, plan, ranks)

    def _from_the_start(self, error: Exception, plan: Plan, ranks: tuple[int, ...]) -> NextAttempt:
        journal = self._caller.journal
        if journal is None or not journal.length:
            raise error
        journal.clear(_first_line(error))
        return plan, ranks, ""

    # --- lost workers -------------------------------------------------------------------------------------------

    def _on_other_workers(self, error: Exception, plan: Plan, ranks: tuple[int, ...]) -> NextAttempt:
        most = self._placement.max_retries
        if self.retries >= most:
            if isinstance(error, LaunchError):
                raise error
            raise RetriesExhausted(
                f"this job was made {self.retries + 1} times, as often as max_retries={most} allows, and lost a worker "
                f"each time; the last one: {error}",
                rank=getattr(error, "rank", None),
            ) from error
        self.retries += 1
        left = self._state.ranks.ready(ranks)
        lost = [rank for rank in ranks if rank not in left]
        chosen = self._plan_for(left, plan) if left and lost else None
        again = f"denoiser call {0 if self._caller.journal is None else self._caller.journal.length}"
        if chosen is None:
            log.warning("%s; the job is made again from %s, on new workers", _first_line(error), again)
            return plan, ranks, ""
        fewer, reason = chosen
        log.warning("%s; the job is made again from %s, with plan %s", _first_line(error), again, fewer)
        reason = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} lost: {reason}"
        return fewer, self._state.in_order(left[: fewer.world_size]), reason

    def _plan_for(self, left: Sequence[int], plan: Plan) -> tuple[Plan, str] | None:
        """Return the plan for the ranks that are left, and its reason; None if the call takes as many as it had."""
        depends_on_plan = isinstance(plan.strategy, StructureGuidance)  # the image does
        if plan.data > 1 or plan.divides_weights or depends_on_plan:
            return None
        try:
            fewer = self._state.choose(self._placement.rule, left, self._caller.bound)
            self._state.check(fewer.plan, left, self._caller.kwargs)
        except PlanError:
            return None
        return (fewer.plan, fewer.explanation) if fewer.plan.data == 1 else None

    # --- memory -------------------------------------------------------------------------------------------------

    def _with_more_memory(self, error: Exception, plan: Plan, ranks: tuple[int, ...]) -> NextAttempt:
        step, steps = self._caller.progress
        free = self._free_memory(ranks)
        tried, self._has_lacked_memory = self._has_lacked_memory, True
        if not tried and 0 < steps == step and (self._caller.vae or self._state.request.vae) != TILED:
            self._caller.vae = TILED
            return self._retried(error, (plan, ranks, "decoded in tiles, since a device lacked memory for the image"))
        if not tried and step < max(steps, 1):
            for larger, more in self._larger(plan, ranks):
                return self._retried(error, (larger, more, f"on more ranks, since a device lacked memory with {plan}"))
        again = ", and there is none either for the attempt that was to take less" if tried else ""
        raise self._lacked_memory(error, ranks, free, again) from error

    def _lacked_memory(self, error: Exception, ranks: tuple[int, ...], free: str, again: str = "") -> WorkerOutOfMemory:
        """Return the error for the caller. `again`: what to add if this was not the first attempt."""
        step, steps = self._caller.progress
        where = f"in step {min(step + 1, steps)} of {steps}" if steps else "before the end of the first step"
        return WorkerOutOfMemory(
            f"a device of ranks {ranks} lacked memory{again}, {where}; "
            f"free now: {free or 'unknown'}. Use a smaller image, fewer images in a call, a plan for more ranks, "
            f"weights=hosted, or vae='tiled'. {error}",
            rank=getattr(error, "rank", None),
            cause=getattr(error, "cause", "") or type(error).__name__,
            free=free,
        )

    def _retried(self, error: Exception, attempt: NextAttempt) -> NextAttempt:
        log.warning("%s; the job is made again %s", _first_line(error), attempt[2])
        return attempt

    def _larger(self, plan: Plan, ranks: tuple[int, ...]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
        """Yield a plan of a higher degree of axis `patch`, and its ranks, if the call may take more."""
        state, named = self._state, self._placement.ranks
        known = tuple(range(state.ranks.world_size)) if named is None else named
        more = (*ranks, *(rank for rank in known if rank not in ranks))
        for degree in range(len(more) * plan.patch // plan.world_size, plan.patch, -1):
            try:
                larger = replace(plan, patch=degree, ratio=())
                state.check(larger, more, self._caller.kwargs)
            except PlanError:
                continue
            yield larger, state.in_order(more[: larger.world_size])

    def _free_memory(self, ranks: tuple[int, ...]) -> str:
        """Let ranks give back what they do not use, and return what is free on each, in words; empty if unknown."""
        try:
            found = self._state.ranks.call("free_memory", releases=True, ranks=ranks)
        except (LaunchError, WorkerError):  # one that was lost with the call, and found no memory to start again
            return ""
        texts = []
        for rank, free in zip(ranks, found, strict=True):
            own = [f"{free.device / GB:.2f} GB of its device"] if free.device is not None else []
            own += [f"{free.host / GB:.2f} GB of the host"] if free.host is not None else []
            texts.append(f"rank {rank} {' and '.join(own) or 'unknown'}")
        return ", ".join(texts)


def _has_lost_workers(error: Exception) -> bool:
    """Return whether workers died or hung, or died when they were started anew. Starts that hang have had minutes."""
    died_anew = isinstance(error, LaunchError) and isinstance(error.__cause__, WorkerDied)
    return died_anew or isinstance(error, (WorkerDied, WorkerHung))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].removesuffix(".")
