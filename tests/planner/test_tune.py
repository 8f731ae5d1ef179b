"""Tuning measures rates and links through our transport, tells a busy machine, and keeps figures by version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.errors import PlanError
from patchpar.models.files import embedded_model
from patchpar.pipeline.planner.tune import rank as rank_module
from patchpar.pipeline.planner.tune import tune as tune_module
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.pipeline.planner.tune.kernel_rates import measured_device
from patchpar.pipeline.planner.tune.rank import TuningRank
from patchpar.pipeline.planner.tune.real_calls import denoiser_calls
from patchpar.pipeline.planner.tune.timer import DeviceTimer
from patchpar.pipeline.planner.tune.tune import measured, tune
from patchpar.plan.replay.measured_machine import MeasuredLink, MeasuredMachine
from patchpar.plan.replay.tape import Operator
from patchpar.shard import verification_cache
from patchpar.shard.verification_cache import VerificationCache
from tests.unit.test_measured_machine import DEVICE
from tests.unit.threads import on_threads

DEVICES = ("cpu", "cpu")
MACHINE = MeasuredMachine(device=DEVICE, devices=2, links=())


def timer_of(seconds: Iterator[float]) -> DeviceTimer:
    """A timer whose runs take so many seconds, one after the other."""
    now = [0.0]

    def clock() -> float:
        return now[0]

    timer = DeviceTimer(torch.device("cpu"), clock)
    timer.work = lambda: now.__setitem__(0, now[0] + next(seconds))  # type: ignore[attr-defined]
    return timer


def test_two_medians_that_agree_are_the_time_of_a_run() -> None:
    timer = timer_of(iter([0.09, 0.01, 0.01, 0.01, 0.0102, 0.3]))
    assert timer.steady(timer.work) == pytest.approx(0.0101)  # type: ignore[attr-defined]


def test_a_busy_machine_is_told() -> None:
    timer = timer_of(0.001 * 1.2**number for number in count())
    assert timer.steady(timer.work) is None  # type: ignore[attr-defined]


def test_links_are_measured_through_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is in no pair takes no part."""
    monkeypatch.setattr(rank_module, "LARGE_MESSAGE", 2**16)

    def run(transport: Any) -> tuple[Any, Any]:
        rank = TuningRank(SimpleNamespace(rank=transport.rank, world_size=3, device="cpu"))  # type: ignore[arg-type]
        rank._transport = transport
        return rank.link(0, 1), rank.all_at_once([(0, 1)])

    (link, both), (none, also), (idle, nothing) = on_threads(3, run)
    assert isinstance(link, MeasuredLink)
    assert link.pair == (0, 1)
    assert link.latency > 0 < link.rate
    assert both > 0 < also
    assert none is None
    assert (idle, nothing) == (None, None)


class FakeRanks:
    """Four ranks on two hosts, of which the links between hosts are slow and share a card."""

    world_size = 4

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "device":
            return [replace(DEVICE, scale=each, memory=10 + rank) for rank, each in enumerate((1.0, 1.2, 1.4, 9.0))]
        if method == "link":
            near = args[0] // 2 == args[1] // 2
            return [MeasuredLink(pair=args, latency=1e-5, rate=1e10 if near else 1e9), None, None, None]
        (pairs,) = args
        near = pairs[0][0] // 2 == pairs[0][1] // 2
        return [2 * tune_module.LARGE_MESSAGE / (2e10 if near else 5e8)] * 4


def test_pairs_are_sorted_into_classes_with_what_they_share() -> None:
    found = measured(FakeRanks(), "float32", (64, 128))  # type: ignore[arg-type]
    assert found is not None
    fast, slow = found.links
    assert fast.pairs == ((0, 1), (2, 3))
    assert fast.shared == float("inf")
    assert slow.shared == pytest.approx(4 * 5e8)
    assert found.device.scale == pytest.approx(1.3)
    assert found.device.memory == 10


def test_figures_are_kept_by_device_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptMachines(VerificationCache(tmp_path))
    with pytest.raises(PlanError, match=r"run patchpar tune --devices cpu:2"):
        kept.of(DEVICES)
    kept.keep(DEVICES, MACHINE)
    assert kept.of(DEVICES) == MACHINE
    assert kept.find(("cpu",)) is None
    kept.scale(DEVICES, 1.5)
    assert kept.of(DEVICES).device.scale == 1.5 * DEVICE.scale
    monkeypatch.setattr(verification_cache.importlib.metadata, "version", lambda package: "99")
    assert kept.find(DEVICES) is None


class FakeExecutor(FakeRanks):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> FakeExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class BusyExecutor(FakeExecutor):
    def call(self, method: str, *args: Any) -> list[Any]:
        return [DEVICE, None]


def test_a_busy_machine_keeps_its_old_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptMachines(VerificationCache(tmp_path))
    kept.keep(DEVICES, MACHINE)
    monkeypatch.setattr(tune_module, "LocalExecutor", BusyExecutor)
    found = tune(DEVICES, "float32", kept)
    assert (found.machine, found.kept_before) == (None, MACHINE)
    assert kept.of(DEVICES) == MACHINE
    monkeypatch.setattr(tune_module, "LocalExecutor", FakeExecutor)
    assert kept.of(DEVICES) != tune(DEVICES, "float32", kept).machine == kept.of(DEVICES)


def test_the_verb_says_that_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(KeptMachines, "in_home", lambda: KeptMachines(VerificationCache(tmp_path)))
    monkeypatch.setattr(tune_module, "LocalExecutor", BusyExecutor)
    answer = CliRunner().invoke(app, ["tune", "--devices", "cpu:2"])
    assert answer.exit_code == 1
    assert "nothing was kept" in answer.stdout
    monkeypatch.setattr(tune_module, "LocalExecutor", FakeExecutor)
    answer = CliRunner().invoke(app, ["tune", "--devices", "cpu:2", "--json"])
    assert answer.exit_code == 0
    assert not json.loads(answer.stdout)["busy"]
    assert KeptMachines.in_home().of(DEVICES).devices == 4
    refused = CliRunner().invoke(app, ["plan", "embedded", "--machine", "local:cpu:3"])
    assert refused.exit_code == 2
    assert "patchpar tune --devices cpu:3" in refused.stderr


def test_the_operators_of_a_real_call_are_those_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger image has as many, with more FLOPs."""
    monkeypatch.setattr(DeviceTimer, "steady", lambda self, run: self.once(run))
    timer = DeviceTimer(torch.device("cpu"))
    small, large = denoiser_calls(timer, torch.float32, embedded_model("embedded-dit"), (64, 128))
    assert len(small.operators) == len(large.operators) > 50
    assert flops(large.operators) > 1.1 * flops(small.operators)
    assert small.seconds is not None
    assert small.seconds > 0


def flops(operators: tuple[Operator, ...]) -> int:
    return sum(each.flops for each in operators)


@pytest.mark.breadth
def test_rates_of_this_processor() -> None:
    found = measured_device(DeviceTimer(torch.device("cpu")), torch.float32, "CPU", 2**30)
    assert min(each.rate for each in (*found.products, *found.convolutions, *found.attention)) > 1e8
    assert all(points[0].num_bytes < points[-1].num_bytes for points in found.moving.values())
