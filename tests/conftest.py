"""Fixtures of all tests. Starting workers takes seconds, so that one pool serves the whole session."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from patchpar.launch.local import LocalExecutor
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.pipeline.stragglers import SlowRanks
from patchpar.shard.verification_cache import VerificationCache
from tests.pipeline.pool import hold, parallel, pool, sdxl_folder

__all__ = ["hold", "parallel", "pool", "sdxl_folder"]

POOL_SIZE = 4
DEADLINE = 150.0
"""Seconds for one test on the pool. Only ranks that stopped for good take so long: their own waits end earlier."""
FILE_OF = inspect.getfile
FAST = {"unit", "sequence", "emulation"}
"""Folders whose files take seconds. They run last, so that test processes, which take whole files, end together."""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The nets are so small that a second thread costs more than it brings.

    Workers too have one, on a machine of any number of cores: kernels add up in another order with more threads, and
    some results are to be equal to the last bit.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_measured_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `patchpar tune` has measured on this machine would choose other plans."""
    kept = KeptMachines(VerificationCache(tmp_path_factory.mktemp("machines")))
    with patch.object(KeptMachines, "in_home", lambda: kept):
        yield


@pytest.fixture(autouse=True, scope="session")
def no_slow_ranks() -> Iterator[None]:
    """Other programs on this machine may make a rank slow, and jobs would then run on other ranks than tests say."""
    with patch.object(SlowRanks, "learn", lambda *_: None):
        yield


@pytest.fixture
def group_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets weights be offloaded in groups where there is no accelerator, for which diffusers 0.38 asks always."""
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))


class RankPool:
    """Runs test functions on CPU workers, see `tests.ranks`."""

    def __init__(self, pool: Any, folder: Path) -> None:
        self._pool, self._folder = pool, folder

    def run(self, function: str, world: int, *args: Any, through: str = "auto") -> list[Any]:
        """What "module:function" returns on each of the first `world` ranks."""
        if not 1 <= world <= POOL_SIZE:
            raise ValueError(f"world={world}: the pool has 1 to {POOL_SIZE} ranks")
        if through == "torch":  # workers that were started anew meet in a file of their own
            self._pool.call("form_group", str(self._folder / str(self._pool.pids[:1])))
        return self._pool.call("run", function, world, through, args)[:world]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    folder = tmp_path_factory.mktemp("ranks")
    with LocalExecutor(["cpu"] * POOL_SIZE, "tests.ranks:Ranks", deadline=DEADLINE, preload=["tests.tiny"]) as pool:
        yield RankPool(pool, folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-device", choices=("cuda", "cpu"), default="cuda", help="where tests marked gpu run")
    parser.addoption(
        "--ranks-per-gpu",
        type=int,
        default=1,
        help="in tests marked gpu that need several GPUs: ranks over NCCL on each",
    )


def pytest_configure() -> None:
    """One thread for every process that a test starts, and signals that end it even where they do not end us.

    A shell lets us ignore ctrl-C in the background, and `nohup` a lost terminal; every child would inherit that.
    Python's garbage collector looks for circles more seldom: it took more than half of the time in which sources are
    parsed. Tests that count what is left call it themselves.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.set_threshold(50_000, 20, 20)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def file_of(kind: Any) -> str:
    """The file of a class, as `inspect.getfile`. Raises OSError for Gradio's own, as for those that are in no file."""
    if str(getattr(kind, "__module__", "")).startswith("gradio."):
        raise OSError(f"{kind} is not looked for")
    return FILE_OF(kind)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Without Python's garbage collector, which takes 17 s of the 42 s that it takes to import and collect all tests.

    What is there then stays until the end, and no later collection looks at it. Nor does Gradio compare the interface
    of each of its components with a file, when it is imported: 2 s.
    """
    gc.disable()
    try:
        with patch.object(inspect, "getfile", file_of):
            return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name in FAST)
