"""Counts for Prometheus: labels come from closed sets, whatever clients ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from patchpar.pipeline.rank_stats import RankStats, StepStats
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.serving.http.application import application
from patchpar.serving.metrics import ServerMetrics, plan_label, size_label
from patchpar.serving.service import ImageService
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until


def rank_of(number: int) -> RankStats:
    step = StepStats(bytes_sent={"halo": 5}, bytes_received={}, seconds_waited={})
    return RankStats(
        rank=number,
        device="cpu",
        bytes_sent={"halo": 10},
        bytes_received={},
        seconds_waited={"halo": 0.5},
        steps=(step, step),
    )


def test_a_call_by_plan_size_and_devices() -> None:
    """Figures of ranks are those of the ranks that worked, which are not always the first ones."""
    metrics = ServerMetrics()
    run = Run(plan=Plan.parse("patch=2", strategy="fresh-edges"), seconds=3.0, ranks=(rank_of(2), rank_of(3)))
    metrics.observe(0.1, 512 * 512, [run])
    found = metrics.text().decode()
    labels = 'plan="patch=2 fresh-edges",size="512x512"'
    for line in (
        f"patchpar_step_seconds_sum{{{labels}}} 1.5",
        f"patchpar_step_seconds_count{{{labels}}} 1.0",
        'patchpar_request_devices_bucket{le="1.0"} 0.0',
        'patchpar_request_devices_bucket{le="2.0"} 1.0',
        'patchpar_bytes_sent_total{kind="halo",rank="2"} 10.0',
        'patchpar_wait_seconds_total{kind="halo",rank="3"} 0.5',
    ):
        assert line in found
    assert 'rank="0"' not in found


@pytest.mark.parametrize(
    ("plan", "label"),
    [
        (Plan(), "one device"),
        (Plan(cfg=2), "cfg=2 exact"),
        (Plan(cfg=2, patch=3, ratio=(1, 2, 3)), "cfg=2 patch=3 exact"),
    ],
    ids=str,
)
def test_labels_of_plans_have_no_options(plan: Plan, label: str) -> None:
    assert plan_label(plan) == label


def test_labels_of_sizes() -> None:
    found = [size_label(pixels) for pixels in (1, 256 * 256, 256 * 257, 2048 * 2048, 1 << 30)]
    assert found == ["256x256", "256x256", "512x512", "2048x2048", "larger"]


def test_what_waits_by_priority_and_how_slow_ranks_are(fake: FakeGenerator, service: ImageService) -> None:
    client: Any = client_of(application(service))
    fake.gate.clear()
    for fields in ({}, {"priority": -10}, {"priority": 3}):
        assert client.post(f"{PATH}?async=true", json={"prompt": "a", **fields}).status_code == 202
        assert fake.started.wait(20)
    until(lambda: service.waiting == 2, "two to wait")
    found = client.get("/metrics").text
    for priority, count in ((-10, 1), (0, 0), (3, 1), (10, 0)):
        assert f'patchpar_queue_length{{priority="{priority}"}} {count}.0' in found
    assert 'patchpar_rank_slowness{rank="0"} 1.0' in found
    assert 'rank="1"' not in found


def test_every_metric_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/operate-a-server.md").read_text()
    found = set(re.findall(r"^# TYPE (patchpar_\w+)", ServerMetrics().text().decode(), re.MULTILINE))
    names = {name for name in found if not name.endswith("_created")}
    assert names - set(re.findall(r"`(patchpar_\w+)`", page)) == set()
    assert "patchpar_bytes_sent_total" in names
