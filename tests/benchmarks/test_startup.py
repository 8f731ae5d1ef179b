"""What the benchmark of start-up writes is what the README quotes it from."""

from __future__ import annotations

from benchmarks.page import contents
from benchmarks.startup import tables
from tests.test_quoted_figures import started

FOUND = {
    "startup": {
        **{"plain_s": 10.0, "forkserver_s": 11.2, "spawn_s": 12.5, "ratio": 1.12},
        **{"plain_cpu_s": 9.0, "forkserver_cpu_s": 13.5, "spawn_cpu_s": 18.0},
    },
    "call": {"plain_s": 0.05, "inline_s": 0.0502, "overhead": 0.004},
}


def test_the_tables_hold_the_figures_and_their_limits() -> None:
    text = tables(FOUND, runs=5, calls=30)
    assert "| first step, s | 10.00 | 11.20 | 1.12 | 1.30 | 12.50 |" in text
    assert "| processor time, s | 9.00 | 13.50 | 1.50 | | 18.00 |" in text
    assert "| 50.0 | 50.2 | +0.4% | 5% |" in text
    assert "medians of 5 starts" in text


def test_the_sentence_of_the_readme_is_read_from_them() -> None:
    (page,) = contents(tables(FOUND, runs=5, calls=30))
    assert started(page["tables"][0]) == "Start-up takes 1.12x as long"
