"""Stale exchanges hide a slow link, fresh ones do not. Layers sleep, so that busy cores change little."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from patchpar.plan.link_model import LinkModel, TimedMessage, link_seconds, step_seconds
from tests.breadth import first_of

ON_RANKS = "tests.benchmarks.overlap_on_ranks"


def measured(ranks: Any, strategy: str, latency: float, load: float) -> dict[str, float]:
    """Waited by both ranks on average, what the link needs, what the model says is waited, and rounds of this step."""
    found = ranks.run(f"{ON_RANKS}:waited", 2, strategy, latency, load)
    messages = [TimedMessage(*rest) for _, *rest in found[0]["messages"]]
    link = LinkModel(latency=latency, rate=found[0]["rate"])
    return {
        "waited": mean(each["seams"] for each in found),
        "link": link_seconds(messages, link),
        "model": step_seconds(found[0]["seconds"], messages, link) - found[0]["seconds"],
        "fresh": len([message for message in messages if message.age == 0]),
    }


@pytest.mark.parametrize(("latency", "load"), first_of([(0.02, 0.0), (0.002, 0.6)]), ids=["latency", "rate"])
def test_a_slow_link_shows_in_exact_steps_and_not_in_stale_ones(ranks: Any, latency: float, load: float) -> None:
    exact = measured(ranks, "exact", latency, load)
    assert exact["fresh"] > 50
    assert exact["waited"] > 0.6 * exact["link"], "the link is not slow: this test would show nothing"
    assert exact["model"] > 0.6 * exact["link"]
    stale = measured(ranks, "displaced", latency, load)
    assert stale["fresh"] == 1, "only the prediction is of this step"
    assert stale["waited"] < 0.5 * exact["waited"]
    assert stale["model"] < 0.3 * exact["model"]
