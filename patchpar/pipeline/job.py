"""One call of a `ParallelPipeline`, from its arguments to its output: in the caller's thread, or in one of its own.

job = pipe.submit(prompt="a red house", ranks=(0, 1))     beside other jobs, on other ranks
job.progress, job.cancel(), job.result(60), await job
suspended = job.suspend()                                 to go on later: pipe.submit(..., resume=suspended)

A job of which a worker is lost is made again from the denoiser call that failed, see `recovery`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from patchpar.errors import CallCancelled, CallSuspended, PatchparError, PlanError, UnsupportedModel, VerificationError
from patchpar.pipeline.auto_plan import without
from patchpar.pipeline.call_journal import CallJournal
from patchpar.pipeline.call_placement import CallPlacement
from patchpar.pipeline.caller import CallController, output_of
from patchpar.pipeline.caller_random import move_generators_on
from patchpar.pipeline.job_progress import JobProgress, job_in_words
from patchpar.pipeline.measured_ratio import measured_seconds, with_measured_ratio
from patchpar.pipeline.messages import CallResult, TensorBytes
from patchpar.pipeline.recovery import Recovery
from patchpar.pipeline.report import Run
from patchpar.pipeline.state import PipelineState, set_event
from patchpar.pipeline.suspended_call import SuspendedCall, restore_states, states_of
from patchpar.plan.plan import MEASURED, Plan

log = logging.getLogger(__name__)


class PipelineJob:
    """A call with the arguments of `caller`, on the ranks of `placement`. Awaitable."""

    def __init__(self, state: PipelineState, caller: CallController, placement: CallPlacement) -> None:
        self._state, self._caller, self._placement = state, caller, placement
        self._recovery = Recovery(state, caller, placement)
        self._generators: tuple[TensorBytes, ...] = ()
        self._best: tuple[int, ...] | None = None  # ranks that an automatic plan takes; None: the first ones
        self._ranks: tuple[int, ...] = ()  # of the latest attempt
        self._suspended: SuspendedCall | None = None
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()  # only `cancel` of the job ends it
        self._is_cancelled = self._is_to_suspend = False
        self._is_queued = threading.Event()  # for its ranks
        self._is_forecast, self._begins = True, [0.0]  # of the latest attempt: see CallOptions; since when it runs
        self.run: Run | None = None
        """Statistics of the call, once it has ended."""
        self.reason = "as requested"
        """Why it has its plan."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {job_in_words(self._future, self.progress, self._ranks)}>"

    @property
    def progress(self) -> JobProgress:
        """The steps so far."""
        step, steps = self._caller.progress
        return JobProgress(step=step, steps=steps)

    @property
    def retries(self) -> int:
        """How often it was made again after it had lost a worker."""
        return self._recovery.retries

    @property
    def stragglers(self) -> dict[int, float]:
        """Ranks that take more than 1.3 times as long as the others for the same work, and how many times."""
        return self._caller.stragglers.slow

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, `timeout` seconds at most; return if it has. Raises LaunchError in a callback."""
        self._state.refuse_to_wait(timeout, is_over=self.is_over)
        return bool(concurrent.futures.wait([self._future], timeout).done)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the pipeline's output, `timeout` seconds at most.

        Raises TimeoutError, after which the job goes on; CallCancelled; and what a call of the pipeline raises.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the job has not ended within {timeout:g} s: wait again, or call cancel()")
        return self._future.result()

    def cancel(self) -> None:
        """End it: at once while it waits for its ranks, else before its next call of a denoiser. Returns at once."""
        self._is_cancelled = True
        self._state.wake()

    def suspend(self, timeout: float | None = None) -> SuspendedCall | None:
        """End it before its next call of a denoiser, so that it can go on later: `submit(resume=...)`.

        Return what that takes; None if it has ended by itself meanwhile, and has its result. `result` raises
        CallSuspended afterwards. Raises TimeoutError after `timeout` seconds, in which the ranks have not come to a
        denoiser call (ask again); CallCancelled; and what a call of the pipeline raises.
        """
        self._state.refuse_to_wait(timeout, is_over=self.is_over)
        self._is_to_suspend = True
        self._state.wake()
        if not self.wait(timeout):
            raise TimeoutError(f"the job has not come to a denoiser call within {timeout:g} s: call suspend() again")
        if self._suspended is None:
            self._future.result()
        return self._suspended

    def snapshot(self) -> SuspendedCall | None:
        """Return what it takes to go on from the denoiser calls made so far, while the job itself goes on.

        None once it has ended.
        """
        journal = self._caller.journal  # which the job's thread gives up at its end
        return None if journal is None else self._as_it_is(journal)

    def _as_it_is(self, journal: CallJournal) -> SuspendedCall:
        return SuspendedCall.of(self._caller, journal, self._state.described.pipeline, self._generators)

    def __await__(self) -> Generator[Any, None, Any]:
        """Return the output. If the task that awaits it is cancelled, the job is, too."""
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        try:
            return await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:
            self.cancel()
            raise

    # --- the call -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run it in a thread of its own. Steps are in `progress` only."""
        self._generators = states_of(self._caller.bound)
        self._caller.go_apart()
        earlier = self._state.follow(self._is_queued)
        threading.Thread(target=self._run, args=(earlier,), name="patchpar-job", daemon=True).start()

    def _run(self, earlier: threading.Event) -> None:
        try:
            self._future.set_result(self._outcome(earlier))
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self._future.set_exception(error)

    def run_aside(self) -> Any:
        """Run it in this thread, whatever else waits for its turn, and return the output."""
        return self._outcome(set_event())

    def run_here(self) -> Any:
        """Run it in this thread, after other such calls, and return the output."""
        with self._state.turns:
            return self._outcome(self._state.follow(self._is_queued))

    def _outcome(self, earlier: threading.Event) -> Any:
        """Return the output. `earlier`: set once the call before this one is in the queue for its ranks."""
        try:
            earlier.wait()
            return self._call()
        except CallCancelled as error:
            journal = self._caller.journal
            if self._is_cancelled or not self._is_to_suspend or journal is None:
                raise
            self._suspended = self._as_it_is(journal)
            raise CallSuspended(f"this job was suspended after {self._suspended.num_calls} denoiser calls") from error
        finally:
            self._caller.release()
            self._is_queued.set()

    def _call(self) -> Any:
        state, caller = self._state, self._caller
        executor, start = state.ranks, time.perf_counter()
        with state.calling(caller):
            try:
                plan, ranks, results = self._call_ranks()
            except BaseException as error:
                self._keep_changes(ended=isinstance(error, CallCancelled))
                raise
            state.keep(caller.made_changes(ended=True), ranks)
            state.slow_ranks.learn(caller.stragglers)
            if executor.kind == "local":
                move_generators_on(caller.bound, results)
            output = output_of(results)
            figures, end = tuple(each for result in results for each in result.figures), time.perf_counter()
            run = Run(plan=plan, seconds=end - start, ranks=figures)
            self.run = state.ended(run, caller.bound, busy=end - self._begins[-1] if self._is_forecast else None)
        return output

    def _keep_changes(self, *, ended: bool) -> None:
        """Bring changes that the callback has made on the ranks of a call that fails to all others, as in one process.

        `ended`: see `made_changes`.
        """
        changes = self._caller.made_changes(ended=ended)
        if changes:
            try:
                self._state.keep(changes, self._ranks)
            except PatchparError as error:  # the call's own error is raised
                log.warning("what a callback has changed is not on all ranks: %s", error)

    def _call_ranks(self) -> tuple[Plan, tuple[int, ...], list[CallResult]]:
        """Return the plan, its ranks and their results. If an automatic plan is not supported, try another one."""
        state, plan = self._state, self._chosen()
        ranks = self._ranks_of(plan)
        while True:
            try:
                return plan, ranks, self._generate(plan, ranks)
            except (UnsupportedModel, VerificationError, PlanError) as error:
                self._recovery.refuse(error, plan, ranks)
                learnt = without(state.described, plan, error)
                if self._placement.plan is not None or learnt is None or state.ranks.kind != "local":
                    raise  # with other executors the caller's generators have advanced
                state.model = learnt
                plan = self._chosen()
                ranks = self._ranks_of(plan)
            except Exception as error:  # noqa: BLE001  raised again unless there is another attempt
                plan, ranks, why = self._recovery.after(error, plan, ranks)
                self.reason = why or self.reason
                restore_states(self._caller.bound, self._generators)  # which a rank in this process has advanced

    def _generate(self, plan: Plan, ranks: tuple[int, ...]) -> list[CallResult]:
        state, caller = self._state, self._caller
        self._ranks = ranks
        state.form_groups(plan, ranks)
        options = state.options_of(caller, plan, ranks)
        self._is_forecast, self._begins = options.is_forecast, [time.perf_counter()]
        results = state.ranks.call(
            "generate",
            caller.kwargs,
            options,
            on_start=None if state.ranks.kind == "torchrun" else lambda _: self._begins.append(time.perf_counter()),
            on_event=caller.on_event,
            on_ask=caller.on_ask,
            is_cancelled=self._is_unwanted,
            ranks=None if state.ranks.kind == "torchrun" else ranks,
            divides=plan.divides_weights,
        )
        return [result for result in results if isinstance(result, CallResult)]

    def _is_unwanted(self) -> bool:
        """Whether it is cancelled. First asked when it is in the queue for its ranks: the next job may follow."""
        self._is_queued.set()
        return self._is_cancelled or self._is_to_suspend or self._caller.has_enough

    def _chosen(self) -> Plan:
        state, plan, kwargs = self._state, self._placement.plan, self._caller.bound
        if plan is None:
            ranks, note = self._candidates()
            choice = state.choose(self._placement.rule, ranks, kwargs)
            plan, self.reason, self._best = choice.plan, choice.explanation + note, choice.ranks or None
        if plan.ratio == MEASURED:
            plan, self.reason = self._measured(plan)
        elif self._placement.plan is not None:
            plan, self.reason = state.on_links(plan, self._ranks_of(plan), kwargs)
        state.check(plan, self._ranks_of(plan), kwargs)
        return plan

    def _measured(self, plan: Plan) -> tuple[Plan, str]:
        """Return the plan with a ratio in numbers, and the reason for it. The ranks are measured once."""
        state, ranks = self._state, self._ranks_of(plan)
        if state.ranks.kind != "local":
            raise PlanError(f"ratio=measured under {state.ranks.kind}: each rank has to run alone first: give numbers")

        def run_alone(caller: CallController, rank: int) -> None:
            alone = replace(self._placement, plan=Plan(), ranks=(rank,), max_retries=0)
            PipelineJob(state, caller, alone).run_aside()

        if not state.seconds_alone.keys() >= set(ranks):
            state.seconds_alone |= measured_seconds(run_alone, self._caller, ranks)
        return with_measured_ratio(plan, ranks, state.seconds_alone)

    def _candidates(self) -> tuple[tuple[int, ...] | None, str]:
        """Return the ranks that a plan is chosen for, None for all, and which are left out since they are slow."""
        state, known = self._state, range(self._state.ranks.world_size)
        note = state.slow_ranks.listed(known)
        if self._placement.ranks is not None or state.weights.plan is not None or not note:
            return self._placement.ranks, ""
        return state.slow_ranks.without(known), note

    def _ranks_of(self, plan: Plan) -> tuple[int, ...]:
        state, named = self._state, self._placement.ranks or self._best
        if named is None and not plan.divides_weights and state.ranks.kind == "local":
            named = state.slow_ranks.last(range(state.ranks.world_size))
        ranks = tuple(range(plan.world_size)) if named is None else named[: plan.world_size]
        return state.in_order(ranks)
