"""One pool of two CPU workers for all tests here; a test that breaks it leaves it to restart by itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Iterator

import pytest

from patchpar.launch.local import LocalExecutor

TOY = "tests.launch.toy:ToyEngine"
PLAIN = "tests.launch.plain:PlainEngine"
DEADLINE = 2.0


@pytest.fixture(scope="session")
def pool() -> Iterator[LocalExecutor]:
    with LocalExecutor(["cpu", "cpu"], TOY, deadline=DEADLINE) as executor:
        executor.call("load", "the model", replay=True)
        yield executor


@pytest.fixture
def template() -> Iterator[None]:
    """The template process of this environment is running, and its descriptors are there before a test counts them.

    Others may end meanwhile, so that there may be fewer afterwards.
    """
    with LocalExecutor(["cpu"], PLAIN) as executor:
        executor.call("rank")
        yield


def is_running(pid: int) -> bool:
    """Whether a process runs or is stopped; one that only waits to be reaped, and not for its threads, is gone."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state = found.stdout.strip()
    return bool(state) and not (state.startswith("Z") and "l" not in state)


def all_gone(pids: Iterable[int], within: float = 20.0) -> bool:
    give_up = time.monotonic() + within
    pids = list(pids)
    assert pids
    while any(map(is_running, pids)):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True
