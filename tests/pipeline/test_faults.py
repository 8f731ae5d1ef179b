"""A worker that dies, hangs or raises: the caller hears which, and the next call draws the right image."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchpar import ParallelPipeline, PlanError, WorkerDied, WorkerError, WorkerHung

from .conftest import EXACT, QUICK, generator, relative_error
from .odd import NeverSteps, RaisesOnOneRank

CALL = {**QUICK, "num_inference_steps": 4, "output_type": "latent"}
DEADLINE = 3.0


@pytest.fixture(scope="module")
def impatient(sdxl_folder: Path) -> Iterator[ParallelPipeline]:
    """Two workers with a short deadline."""
    with ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu:2", deadline=DEADLINE) as pipe:
        pipe.set_progress_bar_config(disable=True)
        yield pipe


def strike(pipe: ParallelPipeline, rank: int, number: signal.Signals) -> None:
    """Send a signal to a worker when the second step is done."""

    def on_step(step: int, total: int) -> None:
        if step == 2:
            os.kill(pipe._executor.pids[rank], number)

    pipe.on_step = on_step


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or only waits to be asked how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def generates_as_before(pipe: ParallelPipeline, plain: Any) -> bool:
    pipe.on_step = None
    want = plain(**CALL, generator=generator())
    return relative_error(pipe(**CALL, generator=generator()), want) <= EXACT


def test_a_worker_is_killed(parallel: ParallelPipeline, plain: Any) -> None:
    """While values are under way: those that it sent for the next step, and those that it should have."""
    parallel.scheduler = parallel.scheduler.from_config(parallel.scheduler.config)  # to be replayed
    parallel.plan = "patch=2,strategy=displaced:warmup_steps=1"
    stale = parallel(**CALL, generator=generator())
    before = parallel._executor.pids
    strike(parallel, 1, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 \(cpu, pid \d+\) was killed by SIGKILL.*; last exchange point '.+'"):
        parallel(**CALL, generator=generator())
    assert time.monotonic() - start < 20, "no deadline has to pass"
    assert is_gone(before[1])
    parallel.on_step = None
    assert relative_error(parallel(**CALL, generator=generator()), stale) == 0.0
    assert relative_error(stale, plain(**CALL, generator=generator())) > EXACT
    assert parallel._executor.pids[0] == before[0], "the other keeps its weights"
    assert parallel._executor.pids[1] != before[1]
    parallel.plan = "patch=2"
    assert generates_as_before(parallel, plain)


@pytest.mark.breadth  # tests/launch has workers that hang
def test_a_worker_stands_still(impatient: ParallelPipeline, plain: Any) -> None:
    impatient.plan = "cfg=2"
    before = impatient._executor.pids
    strike(impatient, 1, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerHung, match=r"rank 1 \(cpu, pid \d+\) does not answer.*last exchange point '.+'"):
        impatient(**CALL, generator=generator())
    assert DEADLINE * 0.8 < time.monotonic() - start < DEADLINE + 30
    assert is_gone(before[1])
    assert generates_as_before(impatient, plain)
    assert impatient._executor.pids[0] == before[0]


def test_one_worker_raises(parallel: ParallelPipeline, plain: Any) -> None:
    """The workers that take the place of all know what a callback had done before."""
    parallel.plan = "patch=2"
    callback = RaisesOnOneRank(parallel._executor.pids[1])
    untouched = plain(**CALL, generator=generator())
    try:
        for pipe in (parallel, plain):
            pipe(**CALL, generator=generator(), callback_on_step_end=filters)
        with pytest.raises(WorkerError, match=r"(?s)rank 1.*ZeroDivisionError: this rank had .*odd\.py.*callback_fn"):
            parallel(**CALL, generator=generator(), callback_on_step_end=callback)
        assert generates_as_before(parallel, plain)
        assert relative_error(untouched, plain(**CALL, generator=generator())) > 100 * EXACT
    finally:
        for pipe in (parallel, plain):
            pipe.disable_freeu()


def filters(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that switches a filter on."""
    if step == 0:
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    return tensors


def test_all_workers_raise_alike(parallel: ParallelPipeline, plain: Any) -> None:
    """The exception is of the class that the pipeline raised, with the worker's traceback behind it."""
    pids, before = parallel._executor.pids, parallel.scheduler
    parallel.scheduler = NeverSteps.from_config(before.config)
    with pytest.raises(ArithmeticError, match="no step is small enough") as caught:
        parallel(**CALL, generator=generator())
    assert "odd.py" in str(caught.value.__cause__)
    parallel.scheduler = before
    assert generates_as_before(parallel, plain)
    assert parallel._executor.pids == pids


@pytest.mark.breadth  # tests/launch has calls that are interrupted
def test_a_listener_raises(parallel: ParallelPipeline, plain: Any) -> None:
    def on_step(step: int, total: int) -> None:
        raise KeyboardInterrupt  # as ctrl-C does, wherever this process then is

    parallel.on_step = on_step
    with pytest.raises(KeyboardInterrupt):
        parallel(**CALL, generator=generator())
    assert generates_as_before(parallel, plain)


def test_calls_from_threads_take_turns(parallel: ParallelPipeline, plain: Any) -> None:
    want = [plain(**CALL, generator=generator(seed)) for seed in range(3)]
    got: dict[int, Any] = {}

    def generate(seed: int) -> None:
        got[seed] = parallel(**CALL, generator=generator(seed))

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(relative_error(got[seed], want[seed]) <= EXACT for seed in range(3))


def test_after_close(sdxl_folder: Path) -> None:
    pipe = ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu")
    pipe.close()
    refuses_all_use(pipe)


@pytest.mark.breadth  # tests/launch has workers that are gone after close
def test_workers_are_gone_after_close(impatient: ParallelPipeline) -> None:
    pids = impatient._executor.pids
    assert len(pids) == 2
    impatient.close()
    assert all(is_gone(pid) for pid in pids)
    refuses_all_use(impatient)


def refuses_all_use(pipe: ParallelPipeline) -> None:
    """Of a pipeline that is closed: it says so, and may be closed once more."""
    pipe.close()
    for use in (lambda: pipe(**QUICK), lambda: pipe.scheduler, lambda: pipe.restore(), pipe.__enter__):
        with pytest.raises(PlanError, match="closed; make a new one"):
            use()
    with pytest.raises(PlanError, match="closed; make a new one"):
        pipe.load_lora_weights  # noqa: B018 - reading it is enough
    assert repr(pipe) == "<ParallelPipeline, closed>"
    assert "encode_prompt" in dir(pipe)
