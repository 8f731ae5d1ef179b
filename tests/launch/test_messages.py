"""A caller may tell a rank something at any time during a call, and nothing of it reaches the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor

LISTENER = "tests.launch.test_messages:Listener"


class Listener:
    """Says that it is there, then returns what it hears until "end"."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def listen(self, timeout: float = 10.0) -> list[Any]:
        self._context.emit("there")
        heard: list[Any] = []
        while not heard or heard[-1] not in ("end", None):
            heard.append(self._context.receive(timeout))
        return heard


@pytest.fixture(scope="module", params=["local", "inline"])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "inline":
        yield InlineExecutor("cpu", LISTENER)
        return
    with LocalExecutor(["cpu", "cpu"], LISTENER) as pool:
        yield pool


class Caller:
    """Tells every rank its own words, from a thread of its own, as soon as the rank is there."""

    def __init__(self, words: list[Any]) -> None:
        self._words, self._report = words, None
        self.threads: list[threading.Thread] = []

    def start(self, report: Any) -> None:
        self._report = report

    def event(self, rank: int, event: Any) -> None:
        thread = threading.Thread(target=lambda: [self._report(rank, (rank, word)) for word in self._words])
        self.threads.append(thread)
        thread.start()
        thread.join()
        self._report(rank, "end")


def test_each_rank_hears_what_it_was_told_in_order(executor: Any) -> None:
    caller = Caller([1, {"two": 2}, "x" * 200_000])
    heard = executor.call("listen", on_event=caller.event, on_start=caller.start)
    for rank, words in enumerate(heard):
        assert words == [(rank, 1), (rank, {"two": 2}), (rank, "x" * 200_000), "end"]


def test_nothing_told_is_nothing_heard(executor: Any) -> None:
    assert executor.call("listen", 0.05) == [[None]] * executor.world_size


def test_what_a_call_left_unheard_does_not_reach_the_next(executor: Any) -> None:
    def too_much(report: Any) -> None:
        for rank in range(executor.world_size):
            for word in ("end", "late"):
                report(rank, word)

    assert executor.call("listen", on_start=too_much) == [["end"]] * executor.world_size
    assert executor.call("listen", 0.05) == [[None]] * executor.world_size
