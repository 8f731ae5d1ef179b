"""The pool's own account of its workers, where another thread closes it and where a link cannot be made."""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.errors import LaunchError, WorkerError
from patchpar.launch import request_loop
from patchpar.launch.channel import EMPTY, Channel, ChannelFrame, FrameKind, frame_bytes
from patchpar.launch.executor import Callbacks
from patchpar.launch.hang_detection import HangLimits, RankActivity
from patchpar.launch.messages import EncodedMessage
from patchpar.launch.pool import WorkerPool
from patchpar.launch.remote_errors import take_down
from patchpar.launch.request_loop import RequestLoop, RequestOutcome
from patchpar.launch.worker_start import WorkerPoolSpec


@dataclass
class Starter:
    """Makes links, but the first time there is no descriptor left."""

    linked: list[tuple[int, int]] = field(default_factory=list)
    fails: int = 1

    def link(self, one: Any, other: Any) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("Too many open files")
        self.linked.append((one.rank, other.rank))


def worker(rank: int, **rest: Any) -> Any:
    nothing = dict.fromkeys(("kill", "release", "ask_to_stop"), lambda: None)
    rest.setdefault("heartbeat", SimpleNamespace(sign=RankActivity(0, 0.0, False), has_begun=lambda request: True))
    return SimpleNamespace(rank=rank, wait=lambda give_up: True, is_alive=lambda: True, **nothing, **rest)


@pytest.fixture
def pool() -> WorkerPool:
    spec = WorkerPoolSpec(
        devices=("cpu", "cpu"), engine="", deadline=1.0, start_timeout=1.0, start_method="spawn", preload=()
    )
    found = WorkerPool(spec, Starter())  # type: ignore[arg-type]
    found._workers.update({rank: worker(rank) for rank in range(2)})
    return found


def test_a_link_that_could_not_be_made_is_made_by_the_next_call(pool: WorkerPool) -> None:
    with pytest.raises(OSError, match="Too many"):
        pool._connect((0, 1))
    for _ in range(2):
        pool._connect((0, 1))
    assert pool._starter.linked == [(0, 1)]  # type: ignore[attr-defined]


def test_a_link_that_cannot_be_made_hides_no_failure(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has failed, the other has ended the call, and both get a new link."""
    failed = RequestOutcome(failures={0: take_down(ValueError("of the engine"))}, unwound=[1], beats={0: 1, 1: 2})
    pool._is_single, pool._starter.fails = True, 0  # type: ignore[attr-defined]

    def run(loop: RequestLoop, opening: Any) -> RequestOutcome:
        pool._starter.fails = 1  # type: ignore[attr-defined]
        return failed

    monkeypatch.setattr(RequestLoop, "run", run)
    with pytest.raises(WorkerError, match="of the engine"):
        pool.call((0, 1), EMPTY, Callbacks(), 0.0)
    pool._connect((0, 1))
    assert pool._starter.linked == [(0, 1)] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(("is_single", "lacking"), [(True, {1}), (False, {0, 1})])
def test_a_lost_rank_of_a_group_takes_the_others_along(pool: WorkerPool, is_single: bool, lacking: set[int]) -> None:
    pool._is_single, pool._ready = is_single, {0, 1}
    assert not pool.lacking([0, 1])
    pool._ready.remove(1)
    assert pool.lacking([0, 1]) == lacking


def test_a_pool_that_another_thread_closes_says_so(pool: WorkerPool) -> None:
    pool.close()
    with pytest.raises(LaunchError, match="closed"):
        pool.call((0, 1), EMPTY, Callbacks(), 0.0)
    pool._connect((0, 1))  # at the end of a call that was running


def test_workers_that_were_being_started_when_another_thread_closed_the_pool_are_ended(pool: WorkerPool) -> None:
    """It has not seen them."""
    pool._workers.clear()

    def start(ranks: Any, *_: Any) -> Any:
        pool.close()
        yield from map(worker, ranks)

    pool._starter.start = start  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match="closed"):
        pool.start([0, 1])
    assert not pool._workers


def test_a_worker_whose_channel_another_thread_has_closed_has_died() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    channel.close()
    theirs.close()
    loop = RequestLoop([worker(0, channel=channel)], 1, Callbacks(), limits=HangLimits.of_call(1.0, 0.0))
    assert loop.run([]).died == [0]


class Drip:
    """A clock that passes half a second with each look at it, and sends a part of what comes slowly then."""

    def __init__(self, line: socket.socket, parts: list[bytes]) -> None:
        self._line, self._parts, self._now = line, parts, 0.0

    def monotonic(self) -> float:
        self._now += 0.5
        if self._parts:
            self._line.sendall(self._parts.pop(0))
        return self._now


SLOW = frame_bytes(ChannelFrame(FrameKind.RESULT, 1, EncodedMessage(stream=pickle.dumps(bytes(3_000_000)))))
PONG = frame_bytes(ChannelFrame(FrameKind.PONG, 1))


@pytest.mark.parametrize(
    ("parts", "is_stuck"),
    [([SLOW[at : at + 100_000] for at in range(0, len(SLOW), 100_000)], False), ([PONG] * 30, True)],
    ids=["message", "pongs"],
)
def test_a_message_that_comes_slowly_is_progress_and_answers_to_pings_are_none(
    parts: list[bytes], is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that shows nothing else: between nodes its heartbeat comes with its messages."""
    ours, theirs = socket.socketpair()
    loop = RequestLoop([worker(0, channel=Channel(ours))], 1, Callbacks(), limits=HangLimits.of_call(5.0, 0.0))
    monkeypatch.setattr(request_loop, "time", Drip(theirs, list(parts)))
    outcome = loop.run([])
    assert outcome.stuck == ([0] if is_stuck else [])
    assert (0 in outcome.results) != is_stuck
    assert not outcome.silent
    ours.close()
    theirs.close()
