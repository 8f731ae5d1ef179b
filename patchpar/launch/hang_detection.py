"""Who gets on, who waits, who is stuck: judged from what every rank shows of itself, by arithmetic alone.

    a mark, or a word to the caller     progress
    processor time                      progress, though the mark stays the same: a long kernel is no fault
    waiting for another rank            neither: nobody is accused of it, and the time it burns is no work

A rank that neither waits nor gets on is stuck after `patience`, whatever the others do. If all wait, none will come:
that is a fault after `patience` too. Work without a mark counts up to `longest_work`, so that an endless loop ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WORK_TIMES = 30  # deadlines that a rank may work without a mark; single layers took eight of them on two loaded cores
WORK_FRACTION = 0.02  # of a core: less than that is not work, but answers to pings and the like
MORE_TIME = "a longer deadline= (--deadline on the command line)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Seconds that a rank may go without any progress, and that it may work without a mark; who sets them."""

    patience: float
    longest_work: float
    way_out: str = MORE_TIME

    @classmethod
    def of_call(cls, deadline: float, expected: float) -> HangLimits:
        """For a call during which a rank may be busy for `expected` seconds beyond the deadline."""
        return cls(patience=deadline + expected, longest_work=WORK_TIMES * deadline + expected)

    @classmethod
    def of_start(cls, seconds: float) -> HangLimits:
        """For a start, which has to be done in that time, work or no work."""
        return cls(patience=seconds, longest_work=seconds, way_out="a longer start_timeout=")


class RankActivity(NamedTuple):
    """What a rank shows: marks made, seconds of processor time used, whether it waits for another rank."""

    beats: int
    work: float
    waits: bool


class RequestProgress:
    """Of all ranks, during one request. `signs`: what they show at its beginning."""

    def __init__(self, limits: HangLimits, signs: Sequence[RankActivity]) -> None:
        self.limits = limits
        self.quiet = 0.0  # s since anyone made a mark or said a word
        self.idle = 0.0  # s since anyone made progress of any kind
        self._signs = list(signs)
        self._worked = [sign.work for sign in signs]  # when it was last taken for progress
        self._idle = [0.0] * len(signs)  # s since it made progress, or waited
        self._markless = [0.0] * len(signs)  # s since it made a mark, said a word, or waited

    def heard(self, rank: int) -> None:
        """It has said a word to the caller."""
        self.quiet = self.idle = self._idle[rank] = self._markless[rank] = 0.0

    def pass_time(self, seconds: float, signs: Sequence[RankActivity]) -> None:
        """So much later they show this."""
        self.quiet += seconds
        self.idle += seconds
        for rank, sign in enumerate(signs):
            self._idle[rank] += seconds
            self._markless[rank] += seconds
            if sign.beats != self._signs[rank].beats:
                self.heard(rank)
                self._worked[rank] = sign.work
            if sign.waits:
                self._idle[rank] = self._markless[rank] = 0.0
                self._worked[rank] = sign.work
            elif sign.work - self._worked[rank] >= WORK_FRACTION * self.limits.patience:
                self._idle[rank] = self.idle = 0.0
                self._worked[rank] = sign.work
            self._signs[rank] = sign

    def stuck(self, active: Collection[int]) -> list[int]:
        """Those of the `active` ranks that will not get on: none while there is hope."""
        limits = self.limits
        accused = [
            rank
            for rank in active
            if not self._signs[rank].waits
            and (self._idle[rank] > limits.patience or self._markless[rank] > limits.longest_work)
        ]
        if accused:
            return accused
        all_wait = all(self._signs[rank].waits for rank in active)
        return list(active) if all_wait and self.idle > limits.patience else []

    def waits(self, rank: int) -> bool:
        """Whether it waits for another."""
        return self._signs[rank].waits

    def works(self, rank: int) -> bool:
        """Whether it has used the processor lately."""
        return not self.waits(rank) and self._idle[rank] <= self.limits.patience
