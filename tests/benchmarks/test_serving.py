"""The overhead of a server is measured against plain calls in turn."""

from __future__ import annotations

import pytest

from benchmarks.serving.__main__ import overhead_lines
from benchmarks.serving.overhead import TimedCall, _of


def test_overhead_is_the_median_of_pairs() -> None:
    pairs = [
        (TimedCall(whole=1.0 + noise, first=0.01), TimedCall(whole=1.02 + noise, first=0.02, queued=0.001))
        for noise in (0.0, 0.5, 3.0)
    ]
    found = _of(7, pairs)
    assert found.beside == pytest.approx(0.02)
    assert found.call == pytest.approx(1.5)
    assert found.ratio == pytest.approx(0.02 / 1.5)
    assert (found.first, found.plain_first, found.queued) == pytest.approx((0.02, 0.01, 0.001))
    text = "\n".join(overhead_lines(found, 3))
    assert "7 steps" in text
    assert "1.3%" in text


@pytest.mark.breadth
def test_a_server_is_measured() -> None:
    from benchmarks.serving.overhead import measure

    found = measure(2, seconds=0.05)
    assert 0 < found.plain_first < found.call
    assert found.first > 0
    assert found.queued < found.first
