"""Recorder of the statistics of one call on one rank: the communicator's counters at the end of every step."""

import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

from patchpar.comm.trace import RankTrace, TraceEvent
from patchpar.comm.traffic import CommStats
from patchpar.pipeline.rank_stats import VAE, RankStats, StepStats
from patchpar.shard.graphs.step_graphs import StepGraphs
from patchpar.shard.stale.state import StaleState

N = TypeVar("N", int, float)


class StatsRecorder:
    """Created when a call begins, with `traffic` at zero. `stale_states`: those of denoisers that have one.

    `tracing`: also record every event, for a trace. `of_vaes`: exchanges of encoding and decoding, which belong to no
    step and are counted as one kind. `graphs`: those of denoisers that have any.
    """

    def __init__(
        self,
        traffic: CommStats,
        stale_states: Sequence[StaleState],
        *,
        tracing: bool,
        of_vaes: CommStats | None = None,
        graphs: Sequence[StepGraphs] = (),
    ) -> None:
        of_vaes = of_vaes or CommStats()
        traffic.events = of_vaes.events = [] if tracing else None
        self._traffic, self._stale_states, self._of_vaes = traffic, tuple(stale_states), of_vaes
        self._graphs = tuple(graphs)
        self._epoch = time.time() - time.perf_counter()
        self._step_began = time.perf_counter()
        self._before = self._counted()
        self._steps: list[StepStats] = []
        self._stale_bytes = 0

    def end_step(self) -> None:
        """Record a scheduler step. Waits of a CUDA stream that have not finished are counted in a later step."""
        self._traffic.book_stalls(block=False)
        now, before = self._counted(), self._before
        self._steps.append(
            StepStats(
                bytes_sent=_more(now.bytes_sent, before.bytes_sent),
                bytes_received=_more(now.bytes_received, before.bytes_received),
                seconds_waited=_more(now.seconds_waited, before.seconds_waited),
                exact_calls=now.exact_calls - before.exact_calls,
                stale_calls=now.stale_calls - before.stale_calls,
                replayed_calls=now.replayed_calls - before.replayed_calls,
            )
        )
        self._before = now
        self._note_step()

    def end_image(self) -> None:
        """Record the size of the stale states when the pipeline has returned, before they are released."""
        self._stale_bytes = sum(history.cache.num_bytes().total for history in self._stale_states)

    def figures(self, rank: int, device: str) -> RankStats:
        """Return all statistics for the caller."""
        traffic, of_vaes = self._traffic, self._of_vaes
        for each in (traffic, of_vaes):
            each.book_stalls(block=True)
        return RankStats(
            rank=rank,
            device=device,
            bytes_sent=_with_vaes(traffic.bytes_sent, of_vaes.bytes_sent),
            bytes_received=_with_vaes(traffic.bytes_received, of_vaes.bytes_received),
            seconds_waited=_with_vaes(traffic.seconds_waited, of_vaes.seconds_waited),
            stale_bytes=self._stale_bytes,
            steps=tuple(self._steps),
            trace=None if traffic.events is None else RankTrace(rank, device, self._epoch, tuple(traffic.events)),
        )

    def _counted(self) -> StepStats:
        """Return the current totals."""
        return StepStats(
            bytes_sent=dict(self._traffic.bytes_sent),
            bytes_received=dict(self._traffic.bytes_received),
            seconds_waited=dict(self._traffic.seconds_waited),
            exact_calls=sum(history.exact_calls for history in self._stale_states),
            stale_calls=sum(history.stale_calls for history in self._stale_states),
            replayed_calls=sum(graphs.replays for graphs in self._graphs),
        )

    def _note_step(self) -> None:
        """Record a trace event. The step begins with its first denoiser call if known, after text encoders."""
        events = self._traffic.events
        if events is not None:
            calls = [event.start for event in events if event.what == "call" and event.start >= self._step_began]
            start = min(calls, default=self._step_began)
            self._step_began = time.perf_counter()
            events.append(TraceEvent("step", "", f"step {len(self._steps) - 1}", start, self._step_began - start))


def _with_vaes(steps: Mapping[str, N], vaes: Mapping[str, N]) -> dict[str, N]:
    """Return the denoisers' values by kind, with the sum of the VAEs' as one kind of its own, if there is any."""
    return {**steps, VAE: sum(vaes.values())} if vaes else dict(steps)


def _more(now: Mapping[str, N], before: Mapping[str, N]) -> dict[str, N]:
    """Return the increase of each kind, without zeros."""
    added = {kind: value - before.get(kind, 0) for kind, value in now.items()}
    return {kind: value for kind, value in added.items() if value}
