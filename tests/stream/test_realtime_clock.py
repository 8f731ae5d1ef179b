"""Chunks by the clock: after an outage a stream is live again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from patchpar.stream.delivery import CATCH_UP, RealtimeClock

CHUNK = 0.2
"""Seconds of a chunk."""


def displayed(ready: list[float], dropped: list[int] | None = None) -> list[float]:
    """Times at which chunks are shown that are ready at these times."""
    clock, now, times = RealtimeClock(), 0.0, []
    for number, at in enumerate(ready):
        now = max(now, at)
        now = clock.due(CHUNK * number, now, 0 if dropped is None else dropped[number])
        times.append(now)
    return times


def test_chunks_that_are_ready_early_are_shown_at_their_times() -> None:
    assert displayed([5.0] * 4) == pytest.approx([5.0, 5.2, 5.4, 5.6])


def test_after_an_outage_chunks_follow_a_little_faster_until_it_is_made_up() -> None:
    live = [CHUNK * number for number in range(400)]
    late = displayed([at if number < 20 else max(at, 8.0) for number, at in enumerate(live)])
    assert late[20] == 8.0, "the first after the outage, 4 s late"
    distances = [after - before for before, after in pairwise(late[20:])]
    assert min(distances) == pytest.approx(CHUNK / CATCH_UP)
    behind = [at - pts for at, pts in zip(late, live, strict=True)]
    assert behind == sorted(behind[:20]) + sorted(behind[20:], reverse=True)
    assert behind[300] == pytest.approx(0.0), "and not earlier than live"


def test_after_an_outage_a_stream_that_drops_is_live_at_once() -> None:
    clock = RealtimeClock()
    assert clock.due(0.0, 10.0, 0) == 10.0
    assert clock.due(0.2, 14.2, 0) == 14.2, "an outage of 4 s"
    assert clock.behind == pytest.approx(4.0)
    assert clock.due(4.2, 14.3, 19) == pytest.approx(14.3), "those between were dropped"
    assert clock.behind == pytest.approx(0.1)
    assert clock.due(4.6, 14.3, 20) == pytest.approx(14.6), "never earlier than the first chunk's clock"
    assert clock.behind == 0.0


@pytest.mark.parametrize("now", [5.0, 500.0])
def test_the_first_chunk_is_due_at_once_whatever_its_timestamp(now: float) -> None:
    """As after a pause, also on a machine that has run for less than the stream."""
    clock = RealtimeClock()
    assert [clock.due(30.0 + CHUNK * number, now, 0) for number in range(2)] == pytest.approx([now, now + CHUNK])
    assert clock.behind == 0.0


def test_a_chunk_that_was_dropped_counts_once() -> None:
    """After the next outage chunks follow a little faster again, as if none had ever been dropped."""
    clock = RealtimeClock()
    assert clock.due(0.0, 10.0, 3) == 10.0, "three before the first"
    assert clock.due(0.2, 14.2, 3) == 14.2
    assert clock.due(0.4, 14.2, 3) == pytest.approx(14.2 + CHUNK / CATCH_UP)
    assert clock.due(0.8, 14.5, 4) == 14.5, "one between was dropped"
    assert clock.due(1.0, 18.0, 4) == 18.0
    assert clock.due(1.2, 18.0, 4) == pytest.approx(18.0 + CHUNK / CATCH_UP)
