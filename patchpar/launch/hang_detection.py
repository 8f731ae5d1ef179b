"""Detect ranks that hang, from heartbeats, processor time and the waiting flag of every rank.

    a heartbeat, or a message to the caller     progress
    parts of a long message                     progress, of the caller's too: slow networks take long for one
    processor time                              progress, also without a heartbeat: a kernel may run long
    waiting for another rank                    neither progress nor a fault; its processor time (polling) is ignored

A rank that neither waits nor makes progress is stuck after `patience`, independent of the others. If all ranks wait
for one another, they are stuck after `patience` too. Work without a heartbeat is limited by `longest_work`, so that an
endless loop is found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

WORK_TIMES = 30  # deadlines of work without a heartbeat; single layers took eight of them on two loaded cores
WORK_FRACTION = 0.02  # of a core: below that it is not work, but answers to pings and the like
LOAD_SECONDS = 3600.0  # beyond a deadline, for a large model on a slow disk; a worker that dies is noticed at once
MORE_TIME = "a longer deadline= (--deadline on the command line)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Seconds without progress, and of work without a heartbeat, before a rank is stuck; `way_out`: what to raise."""

    patience: float
    longest_work: float
    way_out: str = MORE_TIME

    @classmethod
    def of_call(cls, deadline: float, expected: float) -> HangLimits:
        """Return limits for a call in which a rank may make no progress for `expected` seconds beyond the deadline."""
        return cls(patience=deadline + expected, longest_work=WORK_TIMES * deadline + expected)

    @classmethod
    def of_start(cls, seconds: float) -> HangLimits:
        """Return limits for a start, which has to complete within `seconds`, with or without work."""
        return cls(patience=seconds, longest_work=seconds, way_out="a longer start_timeout=")


class RankActivity(NamedTuple):
    """State of a rank: number of heartbeats, seconds of processor time, whether it waits for another rank.

    `moved`: number of parts of long messages that have come or gone.
    """

    beats: int
    work: float
    waits: bool
    moved: int = 0


class RequestProgress:
    """Progress of the ranks of one request. `signs`: the activity of each at its beginning."""

    def __init__(self, limits: HangLimits, signs: Mapping[int, RankActivity]) -> None:
        self.limits = limits
        self.quiet = 0.0  # s since the last heartbeat or message of any rank
        self.idle = 0.0  # s since the last progress of any rank
        self._signs = dict(signs)
        self._worked = {rank: sign.work for rank, sign in signs.items()}  # when it last counted as progress
        self._idle = dict.fromkeys(signs, 0.0)  # s since the rank made progress or waited
        self._beatless = dict.fromkeys(signs, 0.0)  # s since its last heartbeat, message or wait

    def count_message(self, rank: int) -> None:
        """Record a message of this rank to the caller, or a part of a long one."""
        self.quiet = self.idle = self._idle[rank] = self._beatless[rank] = 0.0

    def pass_time(self, seconds: float, signs: Mapping[int, RankActivity]) -> None:
        """Advance the time by `seconds`, after which the ranks' activity is `signs`."""
        self.quiet += seconds
        self.idle += seconds
        for rank, sign in signs.items():
            self._idle[rank] += seconds
            self._beatless[rank] += seconds
            if (sign.beats, sign.moved) != (self._signs[rank].beats, self._signs[rank].moved):
                self.count_message(rank)
                self._worked[rank] = sign.work
            if sign.waits:
                self._idle[rank] = self._beatless[rank] = 0.0
                self._worked[rank] = sign.work
            elif sign.work - self._worked[rank] >= WORK_FRACTION * self.limits.patience:
                self._idle[rank] = self.idle = 0.0
                self._worked[rank] = sign.work
            self._signs[rank] = sign

    def stuck(self, active: Collection[int]) -> list[int]:
        """Return the stuck ones of the `active` ranks."""
        limits = self.limits
        guilty = [
            rank
            for rank in active
            if not self._signs[rank].waits
            and (self._idle[rank] > limits.patience or self._beatless[rank] > limits.longest_work)
        ]
        if guilty:
            return guilty
        all_wait = all(self._signs[rank].waits for rank in active)
        return list(active) if all_wait and self.idle > limits.patience else []

    def waits(self, rank: int) -> bool:
        """Return whether the rank waits for another one."""
        return self._signs[rank].waits

    def works(self, rank: int) -> bool:
        """Return whether the rank has made progress within `patience`, without waiting for another one."""
        return not self.waits(rank) and self._idle[rank] <= self.limits.patience
