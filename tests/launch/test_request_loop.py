"""What a request loop makes of the frames of its ranks, one after another, where the order decides."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.launch import request_loop
from patchpar.launch.channel import Channel, ChannelFrame, FrameKind, frame_bytes
from patchpar.launch.executor import CallAborted, Callbacks
from patchpar.launch.hang_detection import HangLimits, RankActivity
from patchpar.launch.messages import encode
from patchpar.launch.remote_errors import take_down
from patchpar.launch.request_loop import RequestLoop, RequestOutcome

REQUEST, TICK = 1, 0.5


def frame(kind: FrameKind, value: object = None) -> bytes:
    return frame_bytes(ChannelFrame(kind, REQUEST, encode(value)))


RESULT, EVENT = frame(FrameKind.RESULT, "fine"), frame(FrameKind.EVENT, "an event")
HELD = frame(FrameKind.HELD, 0)
FAILED, ABORTED = (frame(FrameKind.FAILED, take_down(error)) for error in (ValueError("why"), CallAborted("cancelled")))
NOTHING = b""


class Ranks:
    """Two ranks, and the clock of their caller: each of its ticks lasts half a second and brings a frame of rank 0."""

    def __init__(self, of_rank_0: Sequence[bytes], of_rank_1: bytes) -> None:
        self.to_come, self._now, self._looks = list(of_rank_0), 0.0, 0
        self._pairs = [socket.socketpair() for _ in range(2)]
        self._pairs[1][1].sendall(of_rank_1)
        self.workers: list[Any] = [
            SimpleNamespace(
                rank=rank,
                channel=Channel(ours),
                is_alive=lambda: True,
                heartbeat=SimpleNamespace(sign=RankActivity(0, 0.0, False), has_begun=lambda request: True),
            )
            for rank, (ours, _) in enumerate(self._pairs)
        ]

    def monotonic(self) -> float:
        self._looks += 1
        if self._looks % 2 == 0:  # after `select`: what comes now is read in the next tick
            self._now += TICK
            if self.to_come:
                self._pairs[0][1].sendall(self.to_come.pop(0))
        return self._now

    def close(self) -> None:
        for pair in self._pairs:
            for end in pair:
                end.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = list[Ranks]()

    def run(
        of_rank_0: Sequence[bytes], of_rank_1: bytes, *, dead: Sequence[int] = (), **callbacks: Any
    ) -> tuple[RequestOutcome, Ranks]:
        ranks = Ranks(of_rank_0, of_rank_1)
        made.append(ranks)
        for rank in dead:
            ranks.workers[rank].is_alive = lambda: False
        monkeypatch.setattr(request_loop, "time", ranks)
        limits = HangLimits.of_call(60.0, 0.0)
        return RequestLoop(ranks.workers, REQUEST, Callbacks(**callbacks), limits=limits, unwinds=True).run([]), ranks

    yield run
    for ranks in made:
        ranks.close()


def test_a_rank_that_ends_soon_after_another_has_failed_is_not_told_to(run: Any) -> None:
    outcome, _ = run([NOTHING] * 2 + [RESULT], FAILED)
    assert list(outcome.results) == [0]
    assert not outcome.unwound


def test_a_rank_has_unwound_when_it_has_answered_and_not_when_it_says_anything_else(run: Any) -> None:
    outcome, ranks = run([NOTHING] * 6 + [EVENT] + [NOTHING] * 3 + [FAILED], FAILED)
    assert outcome.unwound == [0]
    assert not ranks.to_come


def test_events_of_a_call_that_has_failed_are_not_passed_on(run: Any) -> None:
    heard = list[Any]()
    run([EVENT, NOTHING, EVENT, RESULT], FAILED, on_event=lambda *event: heard.append(event))
    assert not heard


def test_events_of_a_rank_that_is_behind_when_a_call_is_cancelled_are_passed_on(run: Any) -> None:
    heard = list[Any]()
    held = HELD + ABORTED
    run([HELD, EVENT, ABORTED], held, on_event=lambda *event: heard.append(event), is_cancelled=lambda: True)
    assert heard == [(0, "an event")]


def test_a_rank_whose_process_ends_after_its_answer_has_answered(run: Any) -> None:
    """Its channel stays open while a child of it runs."""
    outcome, _ = run([RESULT], RESULT, dead=[0, 1])
    assert sorted(outcome.results) == [0, 1]
    assert not outcome.died
