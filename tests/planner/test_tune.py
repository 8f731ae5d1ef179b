"""Tuning measures rates and links through our transport, tells a busy machine, and keeps figures by version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.errors import PlanError
from patchpar.models.files import embedded_model
from patchpar.pipeline.planner.tune import kept_machine, kernel_rates
from patchpar.pipeline.planner.tune import rank as rank_module
from patchpar.pipeline.planner.tune import timer as timer_module
from patchpar.pipeline.planner.tune import tune as tune_module
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.pipeline.planner.tune.kernel_rates import measured_device
from patchpar.pipeline.planner.tune.rank import TuningRank
from patchpar.pipeline.planner.tune.real_calls import RandomDenoiser
from patchpar.pipeline.planner.tune.timer import REPEATS, ROUNDS, DeviceTimer, TimedRun, waited_for_cores
from patchpar.pipeline.planner.tune.tune import CALLS_ON_CPU, measured, tune
from patchpar.plan.replay.measured_device import KernelRate
from patchpar.plan.replay.measured_machine import MeasuredLink, MeasuredMachine
from patchpar.plan.replay.tape import Operator
from patchpar.shard import verification_cache
from patchpar.shard.verification_cache import VerificationCache
from tests.unit.test_measured_machine import DEVICE
from tests.unit.threads import on_threads

DEVICES = ("cpu", "cpu")
MACHINE = MeasuredMachine(device=DEVICE, devices=2, links=())


class FakeDevice:
    """Runs that take so many seconds, one after the other, and wait for a core for a part of them."""

    def __init__(self, seconds: Iterator[float], waited: Iterator[float] = repeat(0.0)) -> None:  # noqa: B008
        self._seconds, self._parts = seconds, waited
        self.now = self.waited = 0.0
        self.timer = DeviceTimer(torch.device("cpu"), lambda: self.now, lambda: self.waited)
        self.runs = 0

    def work(self) -> None:
        seconds, part = next(self._seconds), next(self._parts)
        self.now, self.waited, self.runs = self.now + seconds, self.waited + part * seconds, self.runs + 1


def test_two_medians_that_agree_are_the_time_of_a_run() -> None:
    device = FakeDevice(iter([0.09, 0.01, 0.01, 0.01, 0.0102, 0.3]))
    assert device.timer.steady(device.work) == pytest.approx(0.0101)


def test_a_busy_machine_is_told() -> None:
    device = FakeDevice(0.001 * 1.2**number for number in count())
    assert device.timer.steady(device.work) is None
    assert device.runs == ROUNDS * REPEATS


def test_runs_for_which_others_had_the_core_do_not_count() -> None:
    """One of three is left out; of a round with two there is no median. Control: without the waits they count."""
    seconds = [0.01, 0.02, 0.01, 0.03, 0.04, 0.01, 0.01, 0.01, 0.02]
    waited = [0.0, 0.5, 0.0, 0.7, 0.7, 0.0, 0.0, 0.0, 0.5]
    device = FakeDevice(iter(seconds), iter(waited))
    assert device.timer.steady(device.work) == pytest.approx(0.01)
    device = FakeDevice(chain(seconds, repeat(0.05)))
    assert device.timer.steady(device.work) == pytest.approx(0.05)


def test_a_machine_on_which_others_always_have_the_core_is_busy() -> None:
    """Although all runs take equally long."""
    device = FakeDevice(repeat(0.01), repeat(0.5))
    assert device.timer.steady(device.work) is None
    assert device.timer.best(device.work) == pytest.approx(0.01)  # of a kernel the least seconds, after some tries


def test_a_kernel_is_repeated_until_two_runs_had_the_core() -> None:
    device = FakeDevice(iter([0.01, 0.01, 0.02, 0.01, 0.012]), iter([0.0, 0.0, 0.5, 0.0, 0.0]))
    assert device.timer.best(device.work) == pytest.approx(0.01)
    assert device.runs == 5


def test_a_kernel_that_is_loaded_in_its_first_run_is_repeated_as_often_as_another() -> None:
    """Else the launch of each run, and the wait for its end, would count as a part of a short kernel."""
    device = FakeDevice(chain([0.5], repeat(0.001)))
    assert device.timer.best(device.work) == pytest.approx(0.001)
    assert device.runs == 1 + 1 + 2 * 10


def test_the_system_tells_how_long_threads_waited_for_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for thread, nanoseconds in (("1", 2 * 10**9), ("2", 5 * 10**8)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"123 {nanoseconds} 7\n")
    (tmp_path / "3" / "schedstat").mkdir(parents=True)  # cannot be read, as that of a thread that has ended
    monkeypatch.setattr(timer_module, "THREADS", tmp_path)
    assert waited_for_cores() == pytest.approx(2.5)
    monkeypatch.setattr(timer_module, "THREADS", tmp_path / "none")
    assert waited_for_cores() == 0.0


def test_links_are_measured_through_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is in no pair takes no part."""
    monkeypatch.setattr(rank_module, "LARGE_MESSAGE", 2**16)

    def run(transport: Any) -> tuple[Any, Any]:
        rank = TuningRank(SimpleNamespace(rank=transport.rank, world_size=3, device="cpu"))  # type: ignore[arg-type]
        rank._transport = transport
        assert rank.host_rate() > 0
        return rank.link(0, 1), rank.all_at_once([(0, 1)])

    (link, both), (none, also), (idle, nothing) = on_threads(3, run)
    assert isinstance(link, MeasuredLink)
    assert link.pair == (0, 1)
    assert link.latency > 0 < link.rate
    assert both > 0 < also
    assert none is None
    assert (idle, nothing) == (None, None)


class FakeRanks:
    """Four ranks on two hosts, of which the links between hosts are slow and share a card.

    `names` of their devices; the last one is slow. `seconds` of each run, by rank.
    """

    world_size = 4
    names = ("A", "A", "A", "A")
    seconds = (0.01, 0.01, 0.01, 0.01)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.called: list[tuple[Any, ...]] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        self.called.append((method, *args))
        if method == "timed":
            return [[TimedRun(each)] * REPEATS for each in self.seconds]
        if method == "fit":
            scales = (1.0, 1.2, 1.4, 9.0)
            return [
                replace(DEVICE, name=name, scale=scale, memory=10 + rank)
                for rank, (name, scale) in enumerate(zip(self.names, scales, strict=True))
            ]
        if method == "link":
            near = args[0] // 2 == args[1] // 2
            return [MeasuredLink(pair=args, latency=1e-5, rate=1e10 if near else 1e9), None, None, None]
        if method == "all_at_once":
            (pairs,) = args
            near = pairs[0][0] // 2 == pairs[0][1] // 2
            return [2 * tune_module.LARGE_MESSAGE / (2e10 if near else 5e8)] * 4
        if method == "host_rate":
            return [4e9, 3e9, 4e9, 4e9]
        return [None] * 4


class MixedRanks(FakeRanks):
    names = ("A", "A", "B", "B")


class BusyRanks(FakeRanks):
    """The last rank has the core for half of the time."""

    def call(self, method: str, *args: Any) -> list[Any]:
        found = super().call(method, *args)
        return [*found[:3], [TimedRun(0.01, 0.005)] * REPEATS] if method == "timed" else found


def test_pairs_are_sorted_into_classes_with_what_they_share() -> None:
    found = measured(FakeRanks(), "float32", CALLS_ON_CPU)  # type: ignore[arg-type]
    assert found is not None
    fast, slow = found.links
    assert fast.pairs == ((0, 1), (2, 3))
    assert fast.shared == float("inf")
    assert slow.shared == pytest.approx(4 * 5e8)
    assert found.device.scale == pytest.approx(1.3)
    assert found.device.memory == 10
    assert not found.is_mixed


def test_all_ranks_time_a_call_together_in_two_rounds() -> None:
    ranks = FakeRanks()
    measured(ranks, "float32", CALLS_ON_CPU)  # type: ignore[arg-type]
    names = [name for name, *_ in ranks.called]
    assert names[: 2 + 3 * len(CALLS_ON_CPU)] == ["rates", *["prepare", "timed", "timed"] * len(CALLS_ON_CPU), "fit"]
    assert ranks.called[names.index("fit")][1] == [pytest.approx([0.01] * 4)] * len(CALLS_ON_CPU)


def test_one_rank_that_is_preempted_makes_the_machine_busy() -> None:
    ranks = BusyRanks()
    assert measured(ranks, "float32", CALLS_ON_CPU) is None  # type: ignore[arg-type]
    assert [name for name, *_ in ranks.called].count("timed") == ROUNDS


def test_devices_of_each_kind_have_rates_of_their_own(tmp_path: Path) -> None:
    found = measured(MixedRanks(), "float32", CALLS_ON_CPU)  # type: ignore[arg-type]
    assert found is not None
    assert found.is_mixed
    assert not found.is_uniform
    assert [found.device_at(number).name for number in range(4)] == ["A", "A", "B", "B"]
    assert [found.device_at(number).scale for number in range(4)] == pytest.approx([1.1, 1.1, 5.2, 5.2])
    assert [found.device_at(number).memory for number in range(4)] == [10, 10, 12, 12]
    assert str(found) == "2xA+2xB, measured"
    kept = KeptMachines(VerificationCache(tmp_path))
    kept.keep(DEVICES, found)
    assert kept.of(DEVICES) == found
    kept.scale(DEVICES, 2.0)
    assert [kept.of(DEVICES).device_at(number).scale for number in (0, 3)] == pytest.approx([2.2, 10.4])


def test_figures_are_kept_by_machine_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptMachines(VerificationCache(tmp_path))
    with pytest.raises(PlanError, match=r"run patchpar tune --devices cpu:2"):
        kept.of(DEVICES)
    kept.keep(DEVICES, MACHINE)
    assert kept.of(DEVICES) == MACHINE
    assert kept.find(("cpu",)) is None
    kept.scale(DEVICES, 1.5)
    assert kept.of(DEVICES).device.scale == 1.5 * DEVICE.scale
    for name, other in (("available_cores", 999), ("hardware", ("another",))):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(kept_machine, name, lambda other=other: other)
            assert kept.find(DEVICES) is None, "several machines may have one home folder"
    monkeypatch.setattr(verification_cache, "versions", lambda: {"torch": "99"})
    assert kept.find(DEVICES) is None


class FakeExecutor(FakeRanks):
    def __enter__(self) -> FakeExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class BusyExecutor(BusyRanks, FakeExecutor):
    pass


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


def test_figures_that_cannot_be_kept_are_refused_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`plan --machine local` would ask for the measurement again. Control: with a folder in its place it is made."""
    (tmp_path / "machines").write_text("in the way")
    monkeypatch.setattr(KeptMachines, "in_home", lambda: KeptMachines(VerificationCache(tmp_path / "machines")))
    monkeypatch.setattr(tune_module, "LocalExecutor", lambda *_, **__: pytest.fail("workers were started"))
    answer = CliRunner().invoke(app, ["tune", "--devices", "cpu:2"])
    assert answer.exit_code == 2, answer.output
    assert f"cannot keep figures in {tmp_path / 'machines'}: " in answer.stderr
    assert "home folder" in answer.stderr
    (tmp_path / "machines").unlink()
    monkeypatch.setattr(tune_module, "LocalExecutor", FakeExecutor)
    answer = CliRunner().invoke(app, ["tune", "--devices", "cpu:2"])
    assert answer.exit_code == 0, answer.output


def test_figures_for_which_the_disk_has_no_room_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A correction of figures after calls is none: the old ones stay."""
    kept = KeptMachines(VerificationCache(tmp_path))
    kept.keep(DEVICES, MACHINE)

    def full(path: Path, text: str) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(tune_module, "LocalExecutor", FakeExecutor)
    with pytest.raises(PlanError, match=f"cannot keep figures in {tmp_path}: No space left on device"):
        tune(DEVICES, "float32", kept)
    kept.scale(DEVICES, 2.0)
    assert kept.of(DEVICES) == MACHINE


def test_the_operators_of_a_real_call_are_those_of_the_network() -> None:
    """A larger image has as many, with more FLOPs."""
    model = RandomDenoiser(embedded_model("embedded-dit"), torch.device("cpu"), torch.float32)
    small, large = (model.call(size) for size in (64, 128))
    assert len(small.operators) == len(large.operators) > 50
    assert flops(large.operators) > 1.1 * flops(small.operators)
    assert DeviceTimer(torch.device("cpu")).once(small.run).seconds > 0


def flops(operators: tuple[Operator, ...]) -> int:
    return sum(each.flops for each in operators)


@pytest.mark.parametrize(("dtype", "others"), [(torch.float32, {"bfloat16", "float16"}), (torch.half, {"float32"})])
def test_a_product_and_a_convolution_are_measured_in_other_dtypes_too(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, others: set[str]
) -> None:
    """Both halves count as one. As with cuDNN, convolutions in float32 lose less than products."""
    seconds = {"float32": 4.0, "float16": 2.0, "bfloat16": 1.0}
    of_maps = {"float32": 2.0, "float16": 2.0, "bfloat16": 1.0}

    def measured_product(timer: DeviceTimer, make: Any, m: int, n: int, k: int) -> KernelRate:
        return KernelRate(dims=(m, n, k), rate=1.0 / seconds[str(make(1).dtype).removeprefix("torch.")])

    def measured_convolution(timer: DeviceTimer, make: Any, channels: int, side: int) -> KernelRate:
        rate = 1.0 / of_maps[str(make(1).dtype).removeprefix("torch.")]
        return KernelRate(dims=(side * side, channels, 9 * channels), rate=rate)

    monkeypatch.setattr(kernel_rates, "_product", measured_product)
    monkeypatch.setattr(kernel_rates, "_convolution", measured_convolution)
    monkeypatch.setattr(DeviceTimer, "best", lambda *_, **__: 1.0)
    found = measured_device(DeviceTimer(torch.device("cpu")), dtype, "CPU", 2**30)
    assert found.other_dtypes == {name: seconds[found.dtype] / seconds[name] for name in others}
    assert found.other_convolutions == {name: of_maps[found.dtype] / of_maps[name] for name in others}


@pytest.mark.breadth
def test_rates_of_this_processor() -> None:
    found = measured_device(DeviceTimer(torch.device("cpu")), torch.float32, "CPU", 2**30)
    assert min((*found.other_dtypes.values(), *found.other_convolutions.values())) > 0
    assert min(each.rate for each in (*found.products, *found.convolutions, *found.attention)) > 1e8
    assert all(points[0].num_bytes < points[-1].num_bytes for points in found.moving.values())
