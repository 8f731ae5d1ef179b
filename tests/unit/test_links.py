"""The cost of a link: the recursion gives the closed forms where there are any, and the rule for edges is as stated."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from patchpar.errors import PlanError
from patchpar.plan.link_model import LinkModel, TimedMessage, edges_for, link_seconds, step_seconds

C = 1.0
LAYERS = 20
AT = [C * (layer + 0.5) / LAYERS for layer in range(LAYERS)]
PREDICTION = TimedMessage(C, C, 1e5)


def stale(num_bytes: float) -> list[TimedMessage]:
    return [TimedMessage(at, at, num_bytes, age=1) for at in AT]


def fresh(num_bytes: float, cover: float = 0.0) -> list[TimedMessage]:
    return [TimedMessage(at, at + cover, num_bytes) for at in AT]


def test_a_link_without_latency_and_limit_costs_nothing() -> None:
    for messages in (stale(1e6), fresh(1e6), [*stale(1e6), PREDICTION], []):
        assert step_seconds(C, messages, LinkModel()) == pytest.approx(C)


@pytest.mark.parametrize("load", [0.1, 0.9, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("latency", [0.0, 0.02, 0.4])
def test_stale_messages_cost_what_does_not_fit_into_a_step(load: float, latency: float) -> None:
    messages = stale(1e6)
    link = LinkModel(latency=latency, rate=LAYERS * 1e6 / load)
    assert step_seconds(C, messages, link) == pytest.approx(max(C, load))


def test_a_latency_of_more_than_a_step_is_waited_for() -> None:
    assert step_seconds(C, stale(1e6), LinkModel(latency=1.5)) == pytest.approx(1.5)


@pytest.mark.parametrize("latency", [0.0, 0.002, 0.05])
@pytest.mark.parametrize("rate", [math.inf, 1e9, 1e7])
@pytest.mark.parametrize("cover", [0.0, 0.01])
def test_fresh_messages_cost_what_is_not_covered(latency: float, rate: float, cover: float) -> None:
    want = C + LAYERS * max(0.0, latency + 1e6 / rate - cover)
    assert step_seconds(C, fresh(1e6, cover), LinkModel(latency=latency, rate=rate)) == pytest.approx(want)


def test_a_prediction_behind_stale_messages_waits_for_them_unless_it_overtakes() -> None:
    """The last K,V leave late in the step, and what is left of them then is in front of the prediction."""
    messages = [*(TimedMessage(0.9, 0.9, 1e6, age=1) for _ in range(5)), TimedMessage(C, C, 1e4)]
    one_queue, two = LinkModel(rate=1e7), LinkModel(rate=1e7, overtake=10_000)
    assert step_seconds(C, messages, one_queue) == pytest.approx(0.9 + 0.5 + 0.001)
    assert step_seconds(C, messages, two) == pytest.approx(C + 0.001)


def test_what_overtakes_takes_its_share_of_the_link() -> None:
    messages = [*stale(1e6), *fresh(1e5)]
    link = LinkModel(rate=1e7, overtake=100_000)
    assert step_seconds(C, messages, link) == pytest.approx(LAYERS * 1.1e6 / 1e7, rel=0.02)


def test_fresh_edges_behind_stale_keys_and_values_hide_little_of_them() -> None:
    """One queue: between two rounds of edges only the computing between them hides anything."""
    messages = [TimedMessage(at, at, 1e6, age=1) for at in AT] + [TimedMessage(at + 0.01, at + 0.01, 1e3) for at in AT]
    rate = LAYERS * 1e6 / 0.8
    assert step_seconds(C, messages, LinkModel(rate=rate)) > 1.5
    assert step_seconds(C, messages, LinkModel(rate=rate, overtake=1000)) < 1.01


def test_link_seconds_are_latencies_and_bytes() -> None:
    assert link_seconds(fresh(1e6), LinkModel(latency=0.001, rate=1e8)) == pytest.approx(LAYERS * (0.001 + 0.01))


ROUNDS, EDGES = 60, 6e6


def choose(link: LinkModel, step: float = 1.0, queued: float = 0.0) -> str:
    return edges_for(link, rounds=ROUNDS, edge_bytes=EDGES, step_seconds=step, queued_bytes=queued).edges


@pytest.mark.parametrize(
    ("link", "want"),
    [
        (LinkModel(), "fresh"),
        (LinkModel(latency=1e-3), "fresh"),
        (LinkModel(latency=0.1 / ROUNDS * 0.999), "fresh"),
        (LinkModel(latency=0.1 / ROUNDS * 1.001), "stale"),
        (LinkModel(rate=EDGES / 0.0999), "fresh"),
        (LinkModel(rate=EDGES / 0.1001), "stale"),
        (LinkModel(latency=1e-3, rate=EDGES / 0.05), "stale"),  # either alone would do
    ],
)
def test_edges_are_fresh_up_to_a_tenth_of_the_step(link: LinkModel, want: str) -> None:
    assert choose(link) == want


def test_a_longer_step_affords_a_slower_link() -> None:
    link = LinkModel(latency=5e-3)
    assert choose(link, step=1.0) == "stale"
    assert choose(link, step=10.0) == "fresh"


def test_keys_and_values_in_front_count_beyond_what_is_computed_meanwhile() -> None:
    link = LinkModel(rate=1e8)
    assert choose(link) == "fresh"
    assert choose(link, queued=0.58e8) == "fresh"  # edges alone take 0.06 s
    assert choose(link, queued=0.6e8) == "stale"


def test_the_reason_has_the_figures() -> None:
    found = edges_for(LinkModel(latency=5e-3, rate=1e9), rounds=60, edge_bytes=1e7, step_seconds=1.0)
    assert found.reason == (
        "stale edges: 60 rounds wait 310 ms on a link of 5 ms, 1e+03 MB/s, more than 10% of a step of 1000 ms"
    )


@pytest.mark.parametrize(("step", "rounds"), [(0.0, 1), (-1.0, 1), (math.nan, 1), (1.0, -1)])
def test_numbers_that_cannot_be(step: float, rounds: int) -> None:
    with pytest.raises(PlanError, match="use a positive time"):
        edges_for(LinkModel(), rounds=rounds, edge_bytes=1.0, step_seconds=step)


@pytest.mark.parametrize("covered", [-0.1, 1.1, math.nan])
def test_a_step_cannot_cover_more_than_itself(covered: float) -> None:
    with pytest.raises(PlanError, match="a fraction of at most 1"):
        edges_for(LinkModel(), rounds=1, edge_bytes=1.0, step_seconds=1.0, covered=covered)


@pytest.mark.parametrize(("latency", "rate"), [(-1.0, 1.0), (math.inf, 1.0), (0.0, 0.0), (math.nan, 1.0)])
def test_links_that_cannot_be(latency: float, rate: float) -> None:
    with pytest.raises(PlanError, match="latency >= 0 and a rate > 0"):
        LinkModel(latency=latency, rate=rate)


def test_no_torch_is_needed() -> None:
    code = "import sys, patchpar.plan.link_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
