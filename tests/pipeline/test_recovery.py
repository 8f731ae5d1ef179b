"""A job goes on when workers are killed or stand still: from the denoiser call that failed, on those that are left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar import LaunchError, ParallelPipeline, RetriesExhausted, WorkerDied, WorkerOutOfMemory
from patchpar.pipeline.recovery import Recovery
from patchpar.pipeline.stragglers import LEFT_OUT_SECONDS, SlowRanks, StragglerMonitor
from patchpar.plan.plan import Plan
from tests.pipeline.conftest import EXACT, QUICK, generator, relative_error
from tests.pipeline.odd import DiesAt, LacksMemory
from tests.tiny import build

CALL = {**QUICK, "num_inference_steps": 6, "output_type": "latent"}
SECONDS = 120.0
LEARN = SlowRanks.learn
"""As it is outside of tests, see `no_slow_ranks`."""
PLANS = ("patch=3", "patch=2", "cfg=2", "patch=2,strategy=fresh-edges")


def striking(pipe: ParallelPipeline, job: Any, ranks: tuple[int, ...], sign: signal.Signals, step: int = 2) -> None:
    """Send a signal to workers after a step of a job."""
    while job.progress.step < step:
        time.sleep(0.002)
    for rank in ranks:
        os.kill(pipe._executor.pids[rank], sign)


def pids_of(pipe: ParallelPipeline) -> dict[int, int]:
    """Processes by rank, of the ranks that have one."""
    return {rank: worker.wait_for_pid(0.0) for rank, worker in pipe._executor._pool._workers.items()}


def replaced(pipe: ParallelPipeline, before: tuple[int, ...]) -> list[int]:
    """Ranks that have another worker than before, of those that have one."""
    now = pids_of(pipe)
    return [rank for rank, pid in enumerate(before) if now.get(rank) != pid]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.breadth)])
def test_those_that_are_left_go_on(four: ParallelPipeline, plain: Any, rank: int) -> None:
    call = {**CALL, "num_inference_steps": 8}
    four.submit(**{**call, "num_inference_steps": 1}, plan="patch=3").result(SECONDS)  # verifies it
    before = four._executor.pids
    job = four.submit(**call, plan="patch=3", generator=generator())
    striking(four, job, (rank,), signal.SIGKILL)
    assert relative_error(job.result(SECONDS), plain(**call, generator=generator())) <= EXACT
    assert job.retries == 1
    assert str(job.run.plan) == "cfg=2"
    assert job.reason.startswith(f"rank {rank} lost: guidance is on")
    assert [each.rank for each in job.run.ranks] == [each for each in range(3) if each != rank]
    assert replaced(four, before) == [rank]
    assert job.progress.step == job.progress.steps == 8


@pytest.mark.breadth
def test_all_are_killed(four: ParallelPipeline, plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    call = {**CALL, "num_inference_steps": 12}
    four.submit(**call, plan="patch=2").result(SECONDS)
    before = four._executor.pids
    job = four.submit(**call, plan="patch=2", ranks=(0, 1), generator=generator())
    striking(four, job, (0, 1), signal.SIGKILL)
    assert relative_error(job.result(SECONDS), plain(**call, generator=generator())) <= EXACT
    assert (job.retries, str(job.run.plan)) == (1, "patch=2,strategy=exact")
    assert replaced(four, before) == [0, 1]
    assert re.search(r"[^.]; the job is made again from denoiser call ", caplog.text)
    assert "from denoiser call 0" not in caplog.text


@pytest.mark.breadth  # tests/launch has workers that stand still
def test_one_stands_still(four: ParallelPipeline, plain: Any) -> None:
    call = {**CALL, "num_inference_steps": 30}
    before = four._executor.pids
    job = four.submit(**call, plan="patch=2", ranks=(0, 2), generator=generator())
    striking(four, job, (2,), signal.SIGSTOP)
    assert relative_error(job.result(SECONDS), plain(**call, generator=generator())) <= EXACT
    assert (job.retries, [each.rank for each in job.run.ranks]) == (1, [0])
    assert replaced(four, before) == [2]


@pytest.mark.breadth
def test_a_job_that_kills_its_workers_ends(four: ParallelPipeline) -> None:
    def kills(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        for rank in (0, 1):
            os.kill(pids_of(four)[rank], signal.SIGKILL)
        return tensors

    job = four.submit(**CALL, plan="patch=2", ranks=(0, 1), callback_on_step_end=kills, max_retries=1)
    with pytest.raises(RetriesExhausted, match=r"this job was made 2 times, as often as max_retries=1 allows.*SIGKILL"):
        job.result(SECONDS)
    assert job.retries == 1
    with pytest.raises(WorkerDied):
        four.submit(**CALL, plan="single", callback_on_step_end=kills, max_retries=0).result(SECONDS)
    four.submit(**CALL, plan="patch=3").result(SECONDS)


def killing_new_workers(pipe: ParallelPipeline, times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill the workers that are started next, so many times, before they load the model; return the list of them."""
    executor: Any = pipe._executor
    killed: list[int] = []
    load = executor._replay

    def killed_while_loading(ranks: Any) -> None:
        if len(killed) < times:
            killed.append(pids_of(pipe)[ranks[0]])
            os.kill(killed[-1], signal.SIGKILL)
        load(ranks)

    monkeypatch.setattr(executor, "_replay", killed_while_loading)
    return killed


@pytest.mark.parametrize("times", [1, 2])
def test_new_workers_are_killed_while_they_load(
    four: ParallelPipeline, plain: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a job that has lost all it had, once; and twice in a row, of a job whose ranks were lost before."""
    four.submit(**CALL, plan="single", ranks=(0,)).result(SECONDS)  # verifies it
    killed = killing_new_workers(four, times, monkeypatch)
    if times == 2:
        four._executor._pool.drop([0])
    job = four.submit(**CALL, plan="single", ranks=(0,), generator=generator())
    if times == 1:
        striking(four, job, (0,), signal.SIGKILL)
    assert relative_error(job.result(SECONDS), plain(**CALL, generator=generator())) <= EXACT
    assert (len(killed), job.retries) == (times, 2)


def test_workers_that_cannot_load_the_model_are_not_started_for_ever(
    four: ParallelPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job fails as one whose workers cannot be started, once it was made as often as it may be."""
    with monkeypatch.context() as broken:
        killed = killing_new_workers(four, 100, broken)
        for retries in (0, 1):
            four._executor._pool.drop([0])
            job = four.submit(**CALL, plan="single", ranks=(0,), max_retries=retries)
            with pytest.raises(LaunchError, match=r"repeating 'load' failed: .*SIGKILL"):
                job.result(SECONDS)
            assert (len(killed), job.retries) == (1 + 2 * retries, retries)
        with pytest.raises(LaunchError, match=r"could not be started 3 times in a row"):
            four.submit(**CALL, plan="single", ranks=(0,)).result(SECONDS)
        assert len(killed) == 3
    four._executor._failed_starts.clear()
    four.submit(**CALL, plan="single", ranks=(0,)).result(SECONDS)


@pytest.mark.breadth
def test_a_callback_is_asked_once_for_each_step(four: ParallelPipeline) -> None:
    asked = []

    def kills(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        asked.append(step)
        if step == 2 and asked.count(2) == 1:
            os.kill(four._executor.pids[1], signal.SIGKILL)
        return {"latents": tensors["latents"] / 2}

    def halves(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] / 2}

    want = four.submit(**CALL, plan="patch=2", callback_on_step_end=halves, generator=generator()).result(SECONDS)
    job = four.submit(**CALL, plan="patch=2", callback_on_step_end=kills, generator=generator())
    assert relative_error(job.result(SECONDS), want) <= EXACT
    assert (asked, job.retries) == ([0, 1, 2, 3, 4, 5], 1)


def test_lack_of_memory_is_told_though_workers_cannot_say_what_is_free() -> None:
    """One that was lost has to be started for it, and may find no memory for the model."""

    def call(*args: Any, **options: Any) -> Any:
        raise LaunchError("the workers could not be started: no memory")

    state: Any = SimpleNamespace(ranks=SimpleNamespace(kind="local", call=call))
    caller: Any = SimpleNamespace(journal=None, progress=(1, 4))
    placement: Any = SimpleNamespace()
    with pytest.raises(WorkerOutOfMemory, match=r"in step 2 of 4; free now: unknown.*CUDA out of memory") as raised:
        Recovery(state, caller, placement).after(WorkerOutOfMemory("CUDA out of memory", rank=1), Plan(), (0, 1))
    assert (raised.value.rank, raised.value.free) == (1, "")


@pytest.mark.breadth
def test_a_device_lacks_memory(tmp_path: Path) -> None:
    """For a whole image, not for a half: two ranks have it. Nobody dies, and what still does not fit is refused."""
    tiny, room = build("sdxl"), tmp_path / "room"
    tiny.pipe.unet.conv_in = LacksMemory(tiny.pipe.unet.conv_in, room)
    room.write_text("1000000")
    with ParallelPipeline(tiny.pipe, devices="cpu:2", verify=False) as pipe:
        pipe.set_progress_bar_config(disable=True)
        want = pipe.submit(**CALL, plan="single", generator=generator()).result(SECONDS)
        before = pipe._executor.pids
        room.write_text(str(2 * 4 * 12 * 16))
        job = pipe.submit(**CALL, plan="single", generator=generator())
        assert relative_error(job.result(SECONDS), want) <= EXACT
        assert str(job.run.plan) == "patch=2,strategy=exact"
        assert job.reason == "on more ranks, since a device lacked memory with single"
        named = pipe.submit(**CALL, plan="single", ranks=(1,))
        with pytest.raises(
            WorkerOutOfMemory,
            match=r"ranks \(1,\) lacked memory, before the end of the first step; free now: rank 1 .*GB",
        ) as raised:
            named.result(SECONDS)
        assert raised.value.free in str(raised.value)
        assert raised.value.free.startswith("rank 1 ")
        room.write_text("10")
        with pytest.raises(WorkerOutOfMemory, match=r"there is none either for the attempt.*Use a smaller"):
            pipe.submit(**CALL, plan="single").result(SECONDS)
        pipe.plan = "patch=2"
        with pytest.raises(WorkerOutOfMemory, match=r"ranks \(0, 1\) lacked memory, before.*free now: .*Use a smaller"):
            pipe(**CALL)
        assert pipe._executor.pids == before


def test_a_device_lacks_memory_to_decode(tmp_path: Path) -> None:
    tiny, room = build("sdxl"), tmp_path / "room"
    decoder = tiny.pipe.vae.decoder
    decoder.conv_in = LacksMemory(decoder.conv_in, room)
    tiny.pipe.vae.tile_latent_min_size, tiny.pipe.vae.tile_sample_min_size = 8, 64
    room.write_text(str(4 * 8 * 8))
    call = {**CALL, "output_type": "pt", "num_inference_steps": 2}
    with ParallelPipeline(tiny.pipe, devices="cpu", verify=False) as pipe:
        pipe.set_progress_bar_config(disable=True)
        job = pipe.submit(**call, generator=generator())
        found = job.result(SECONDS)
        assert job.reason.startswith("decoded in tiles")
    tiny.pipe.vae.enable_tiling()
    assert relative_error(found, tiny.pipe(**call, generator=generator())) <= EXACT


def test_stragglers(caplog: pytest.LogCaptureFixture) -> None:
    monitor = StragglerMonitor()
    for number in range(8):
        for rank, seconds in ((0, 1.0), (1, 1.2), (2, 1.5)):
            assert (monitor.slow == {}) or (number, rank) == (7, 2)
            monitor.add(rank, seconds if number % 2 else 0.0)
    assert monitor.slow == {2: pytest.approx(1.5 / 1.1)}
    monitor.add(2, 1.5)
    assert [record.message.partition(" in ")[0] for record in caplog.records] == [
        "rank 2 took 1.36 times as long as the others"
    ]
    monitor.reset()
    assert monitor.slow == {}


def monitored(**seconds: float) -> StragglerMonitor:
    """A job whose ranks r0, r1, ... took so long for each call."""
    monitor = StragglerMonitor()
    for _ in range(8):
        for rank, each in seconds.items():
            monitor.add(int(rank[1:]), each)
    return monitor


def test_slow_ranks_are_left_out_for_some_minutes() -> None:
    now = [0.0]
    ranks = SlowRanks(lambda: now[0])
    LEARN(ranks, monitored(r0=1.0, r1=2.0, r2=1.0))
    assert ranks.last(range(4)) == (0, 2, 3, 1)
    assert ranks.without(range(4)) == (0, 2, 3)
    assert ranks.listed(range(4)) == "; without rank 1 (2.00 times as slow)"
    assert ranks.without([1]) == (1,)
    assert ranks.listed([1]) == ""
    LEARN(ranks, monitored(r1=1.0))  # alone, which tells nothing
    assert ranks.without(range(4)) == (0, 2, 3)
    LEARN(ranks, monitored(r1=1.0, r3=1.0))
    assert ranks.without(range(4)) == (0, 1, 2, 3)
    LEARN(ranks, monitored(r1=2.0, r3=1.0))
    now[0] = LEFT_OUT_SECONDS - 1
    assert ranks.without(range(4)) == (0, 2, 3)
    now[0] = LEFT_OUT_SECONDS
    assert ranks.without(range(4)) == (0, 1, 2, 3)


def test_a_slow_rank_is_kept_out_of_wide_plans(four: ParallelPipeline, plain: Any) -> None:
    """The pipeline learns it from a job; here from a made one."""
    slow, call = four._state.slow_ranks, {**CALL, "num_inference_steps": 2}
    LEARN(slow, monitored(r0=3.0, r1=1.0))
    try:
        job = four.submit(**call, plan="auto", generator=generator())
        assert relative_error(job.result(SECONDS), plain(**call, generator=generator())) <= EXACT
        assert job.reason.endswith("; without rank 0 (3.00 times as slow)")
        assert 0 not in [each.rank for each in job.run.ranks]
        assert len(job.run.ranks) > 1
        for options, used in (({"plan": "single"}, [1]), ({"plan": "single", "ranks": (0,)}, [0])):
            job = four.submit(**call, **options)
            job.result(SECONDS)
            assert [each.rank for each in job.run.ranks] == used
    finally:
        LEARN(slow, monitored(r0=1.0, r1=1.0))


@pytest.mark.breadth
def test_a_rank_that_is_slower_is_reported(four: ParallelPipeline) -> None:
    """One shares its core with another thread of the same process that never waits."""
    job = four.submit(**{**CALL, "num_inference_steps": 9}, plan="patch=2")
    job.result(SECONDS)
    counts = {rank: len(seconds) for rank, seconds in job._caller.stragglers._seconds.items()}
    assert counts == {0: 8, 1: 8}


def victims(pipe: Any) -> list[str]:
    """Six layers of a denoiser, from its first to its last."""
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    leaves = [name for name, module in denoiser.named_modules() if name and not list(module.children())]
    return [leaves[number * (len(leaves) - 1) // 5] for number in range(6)]


@pytest.mark.breadth
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["sdxl", "sd3", "sd_controlnet"])
def test_each_rank_dies_at_each_point(name: str, plan: str, tmp_path: Path) -> None:
    lose_each_rank(name, plan, tmp_path, signal.SIGKILL, slice(None), deadline=60.0)


@pytest.mark.breadth
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["sdxl", "sd3", "sd_controlnet"])
def test_each_rank_stands_still(name: str, plan: str, tmp_path: Path) -> None:
    """At the first and at a later point: each costs a deadline."""
    lose_each_rank(name, plan, tmp_path, signal.SIGSTOP, slice(0, None, 4), deadline=10.0)


def lose_each_rank(
    name: str, plan: str, tmp_path: Path, sign: signal.Signals, points: slice, *, deadline: float
) -> None:
    """Send each rank of a plan a signal at some points of its denoiser: each time its job ends all the same."""
    tiny = build(name)
    denoiser = tiny.pipe.unet if hasattr(tiny.pipe, "unet") else tiny.pipe.transformer
    orders = tmp_path / "orders"
    orders.write_text("")
    paths = victims(tiny.pipe)[points]
    for path in paths:
        layer = denoiser.get_submodule(path)
        layer.register_forward_pre_hook(DiesAt(path, orders))
    call = {**tiny.call_kwargs, "num_inference_steps": 5, "output_type": "latent"}
    want = tiny.pipe(**call, generator=generator())
    stale = "strategy" in plan
    cache = tmp_path / "verifications"
    with ParallelPipeline(tiny.pipe, devices="cpu:3", verify=cache, deadline=deadline) as pipe:
        pipe.set_progress_bar_config(disable=True)
        alone = pipe.submit(**call, plan=plan, generator=generator()).result(SECONDS)
        for rank in range(len(pipe.submit(**call, plan=plan).result(SECONDS) and pipe.last_run.ranks)):
            for path in paths:
                before = pipe._executor.pids
                orders.write_text(f"{before[rank]} 3 {path} {sign.name}")
                job = pipe.submit(**call, plan=plan, generator=generator())
                found = job.result(SECONDS)
                assert (orders.read_text(), job.retries) == ("", 1), (rank, path)
                assert replaced(pipe, before) == [rank], (rank, path)
                error = relative_error(found, want)
                assert error <= (relative_error(alone, want) if stale else EXACT), (rank, path, error)
                pipe.submit(**call, plan=plan).result(SECONDS)
