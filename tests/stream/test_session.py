"""What a session does with ranks that only pretend: order, credit, policies, controls, interruption."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchpar.errors import LaunchError, PlanError, WorkerDied, WorkerError, WorkerOutOfMemory
from patchpar.models.streaming.causal.audio_conditioner import AudioConfig
from patchpar.stream import base_session
from patchpar.stream import driver as stream_driver
from patchpar.stream import session as session_module
from patchpar.stream.audio_track import MARGIN, AudioTrack, KeepAlive
from patchpar.stream.delivery import RealtimeClock, StreamDelivery, StreamFormat
from patchpar.stream.events import Parameter, Reference
from patchpar.stream.messages import (
    BeginBlock,
    BlockReady,
    CancelStream,
    EndStream,
    LostStage,
    ProducedBlock,
    PromptUpdate,
    ReferenceUpdate,
    StreamRun,
)
from patchpar.stream.session import StreamSession
from tests.stream.tiny import AUDIO, FRAMES, sink
from tests.tensors import elsewhere, noise

COURSE = StreamRun(ranks=2, seed=0, rows=4, columns=6, first_block=0, adapt_sink=True)
FORMAT = StreamFormat(fps=20, height=8, width=12, frames=FRAMES, per_latent=2)
IMAGE = torch.zeros(8, 12, 3, dtype=torch.uint8)


class Ranks:
    """Pretend to run the stages: every block comes out at once, its number in every pixel.

    `dies`: (run, block) pairs at which a worker dies.
    """

    def __init__(self, *dies: tuple[int, int]) -> None:
        self.dies = set(dies)
        self.runs: list[StreamRun] = []
        self.begun: list[tuple[int, BeginBlock]] = []
        self.reported: list[tuple[int, Any]] = []
        self.idle = threading.Event()

    def run(
        self, course: StreamRun, on_event: Callable[[int, Any], None], on_start: Callable[[Any], None]
    ) -> list[Any]:
        heard: queue.Queue[Any] = queue.Queue()

        def report(rank: int, value: Any) -> None:
            self.reported.append((rank, value))
            if rank == 0:
                heard.put(value)

        self.runs.append(course)
        on_start(report)
        block = course.first_block
        while True:
            on_event(0, BlockReady(block=block))
            self.idle.set()
            word = heard.get(timeout=10)
            self.idle.clear()
            if isinstance(word, (EndStream, CancelStream)):
                return []
            self.begun.append((block, word))
            if (len(self.runs) - 1, block) in self.dies:
                raise WorkerDied("rank 1 was killed")
            first = block == 0 and course.adapt_sink
            frames = torch.full((3 if block == course.first_block else 4, 8, 12, 3), block, dtype=torch.uint8)
            on_event(1, ProducedBlock(block=block, frames=frames, seconds=0.1, sink=sink(5) if first else None))
            block += 1


def session(
    ranks: Ranks,
    *,
    blocks: int | None = 6,
    credit: int = 3,
    track: AudioTrack | None = None,
    courses: tuple[StreamRun, ...] = (COURSE,),
    **delivery: Any,
) -> StreamSession:
    how = StreamDelivery(**{"restarts": 1, **delivery})
    return StreamSession(ranks.run, courses, FORMAT, how, track, credit=credit, blocks=blocks)


def test_chunks_come_in_order_with_exact_times() -> None:
    with session(Ranks()).begin(PromptUpdate(text="a")) as stream:
        chunks = list(stream)
    assert [chunk.block for chunk in chunks] == list(range(6))
    ends = torch.tensor([len(chunk.frames) for chunk in chunks]).cumsum(0).tolist()
    assert [round(chunk.pts * 20) for chunk in chunks] == [0, *ends[:-1]] == [0, 3, 7, 11, 15, 19]
    assert stream.status == "finished"
    assert list(stream) == []


def refused_to_a_child(stream: Any) -> str:
    """What a child that is forked now is told that wants the next of a stream."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # it is to be told at once
        try:
            next(stream)
        except LaunchError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as reported:
        return reported.read().decode()


def test_a_forked_child_is_told_and_does_not_wait() -> None:
    """Nobody would ever give it a chunk: threads do not come along."""
    with session(Ranks(), blocks=None).begin() as stream:
        next(stream)
        assert "was forked from it and cannot use them" in refused_to_a_child(stream)
        next(stream)


def test_async() -> None:
    async def blocks() -> list[int]:
        with session(Ranks()).begin() as stream:
            return [chunk.block async for chunk in stream]

    assert asyncio.run(blocks()) == list(range(6))


def test_a_wait_that_is_ended_loses_no_chunk() -> None:
    """While the stream is paused nothing comes; what comes then is the next one."""

    async def blocks() -> list[int]:
        async with session(Ranks(), blocks=None).begin() as stream:
            items, found = aiter(stream), list[int]()
            stream.pause()
            for _ in range(2):
                with suppress(asyncio.TimeoutError):
                    while True:
                        found.append((await asyncio.wait_for(anext(items), 0.5)).block)
            stream.resume()
            return [*found, *[(await anext(items)).block for _ in range(3)]]

    found = asyncio.run(blocks())
    assert found == list(range(len(found)))


@pytest.mark.parametrize("credit", [1, 3])
def test_a_slow_watcher_stops_the_ranks(credit: int) -> None:
    ranks = Ranks()
    with session(ranks, blocks=None, credit=credit).begin() as stream:
        for taken in range(1, 6):
            next(stream)
            while len(ranks.begun) < taken + credit or not ranks.idle.wait(10):
                pass
            assert stream.in_flight == credit
            assert len(ranks.begun) == taken + credit


@pytest.mark.parametrize(("output", "first"), [("drop_oldest", 18), ("skip_to_live", 19)])
def test_a_slow_watcher_loses_chunks_instead(output: str, first: int) -> None:
    ranks = Ranks()
    with session(ranks, blocks=20, output=output).begin() as stream:
        while stream.status == "running":
            pass
        chunks = list(stream)
    assert [chunk.block for chunk in chunks] == list(range(first, 20))
    assert stream.dropped == first
    assert len(ranks.begun) == 20


def test_a_pause_holds_the_next_block_and_changes_nothing() -> None:
    ranks = Ranks()
    with session(ranks, blocks=8, credit=2).begin() as stream:
        first = next(stream)
        effect = stream.pause()
        held = [next(stream).block for _ in range(effect.block - 1)]
        assert ranks.idle.wait(10)
        assert (stream.status, len(ranks.begun)) == ("paused", effect.block)
        assert stream.resume() == effect
        rest = [chunk.block for chunk in stream]
    assert [first.block, *held, *rest] == list(range(8))


def test_an_update_holds_from_the_block_that_it_names() -> None:
    ranks = Ranks()
    with session(ranks, blocks=9, credit=1).begin(PromptUpdate(text="first")) as stream:
        next(stream)
        later = stream.set_prompt("later", at=5, transition="blend", over=2)
        soon = stream.set_param("audio_scale", 0.5)
        displayed = stream.set_reference(IMAGE)
        assert (later.block, later.seconds) == (5, 19 / 20)
        with pytest.raises(PlanError, match="at=0: block 0 has begun; use at="):
            stream.set_prompt("too late", at=0)
        list(stream)
        with pytest.raises(PlanError, match="is finished"):
            stream.set_prompt("over")
    wishes = {block: begin.updates for block, begin in ranks.begun if begin.updates}
    assert wishes[0] == (PromptUpdate(text="first"),)
    assert wishes[5] == (PromptUpdate(text="later", transition="blend", over=2),)
    assert soon.block == displayed.block
    param, reference = wishes[soon.block]
    assert param == Parameter(name="audio_scale", value=0.5)
    assert isinstance(reference, ReferenceUpdate)


def test_wishes_that_cannot_be_are_refused_at_once() -> None:
    with session(Ranks(), blocks=None).begin() as stream:
        for at in (2.5, float("nan"), True, "3"):
            with pytest.raises(PlanError, match="it must be the number of a block, from"):
                stream.set_prompt("x", at=at)  # type: ignore[arg-type]
        for over in (1.5, -1, float("nan"), 1e9):
            with pytest.raises(PlanError, match=r"over=.* it must be a whole number of blocks from 0 to 65536"):
                stream.set_prompt("x", transition="blend", over=over)  # type: ignore[arg-type]
        for prompt in (3, None, "x" * 70_000):
            with pytest.raises(PlanError, match=r"prompt=.* it must be a text of at most 65536 characters"):
                stream.set_prompt(prompt)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="'fade'"):
            stream.set_prompt("x", transition="fade")  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="'loudness' is unknown"):
            stream.set_param("loudness", 1)
        with pytest.raises(PlanError, match="takes no audio"):
            stream.push_audio(torch.zeros(5), 2000)
        with pytest.raises(PlanError, match="use stop"):
            stream.end_audio()
        with pytest.raises(PlanError, match=r"shape \(5, 5, 3\)"):
            stream.set_reference(IMAGE[:5, :5])
    options: tuple[dict[str, Any], ...] = ({"output": "x"}, {"pace": "x"}, {"lead": 0}, {"restarts": -1}, {"hold": 0})
    never = ({"hold": float("inf")}, {"hold": float("nan")}, {"keep_alive": "no"})
    for wrong in (*options, *never, {"fps": 0}, {"fps": 1e-5}):
        with pytest.raises(PlanError):
            StreamDelivery(**wrong)


def test_cancel_ends_at_once_and_every_rank_is_told() -> None:
    ranks = Ranks()
    with session(ranks, blocks=None).begin() as stream:
        next(stream)
        stream.cancel()
        assert list(stream) == []
    assert stream.status == "cancelled"
    assert [rank for rank, word in ranks.reported if isinstance(word, CancelStream)] == [0, 1]


def test_ranks_of_a_stream_that_was_cancelled_before_they_began_are_told() -> None:
    """Else they would wait for orders."""
    stream, sent = session(Ranks()), list[tuple[int, Any]]()
    stream.cancel()
    stream._on_start(lambda rank, value: sent.append((rank, value)))
    assert sent == [(0, CancelStream()), (1, CancelStream())]


def test_a_control_after_the_end_says_that_it_is_too_late() -> None:
    with session(Ranks(), blocks=None, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        pass
    controls: list[Callable[[], Any]] = [
        lambda: stream.push_audio(torch.zeros(5), 2000),
        stream.end_audio,
        lambda: stream.set_prompt("a"),
        lambda: stream.set_param("audio_scale", 1),
        lambda: stream.set_reference(IMAGE),
        stream.pause,
        stream.resume,
    ]
    for control in controls:
        with pytest.raises(PlanError, match="this stream is cancelled: begin another one"):
            control()
    stream.stop()
    stream.cancel()
    stream.close()
    assert stream.flush() == 0


def test_an_abandoned_async_stream_lets_go() -> None:
    stream = session(Ranks(), blocks=None).begin()

    async def first() -> int:
        async with stream:
            async for chunk in stream:
                return chunk.block
        raise AssertionError

    assert asyncio.run(first()) == 0
    assert (stream.status, stream.is_free_within(0)) == ("cancelled", True)


def test_stop_lets_come_out_what_is_under_way() -> None:
    ranks = Ranks()
    with session(ranks, blocks=None).begin() as stream:
        next(stream)
        end = stream.stop().block
        assert [chunk.block for chunk in stream] == list(range(1, end))


def test_a_paused_stream_is_stopped_too() -> None:
    ranks = Ranks()
    with session(ranks, blocks=None).begin() as stream:
        next(stream)
        end = stream.pause().block
        assert stream.stop().block == end
        assert [chunk.block for chunk in stream] == list(range(1, end))
    assert stream.status == "finished"


def test_flush_throws_away_what_is_ready() -> None:
    ranks = Ranks()
    with session(ranks, blocks=5, credit=5).begin() as stream:
        while stream.status == "running":
            pass
        assert stream.flush() == 5
        assert list(stream) == []


def test_a_dead_worker_begins_a_new_epoch() -> None:
    """The stream goes on where it was, under the conditions that held, with the sink it had made."""
    ranks = Ranks((0, 4))
    with session(ranks, blocks=7, credit=1).begin(PromptUpdate(text="first"), ReferenceUpdate(image=IMAGE)) as stream:
        next(stream)
        stream.set_prompt("second", at=2, transition="recache")
        stream.set_param("audio_scale", 0.5, at=4)
        chunks = list(stream)
    assert [(chunk.block, chunk.epoch, len(chunk.frames)) for chunk in chunks] == [
        (1, 0, 4), (2, 0, 4), (3, 0, 4), (4, 1, 4), (5, 1, 4), (6, 1, 4),
    ]  # fmt: skip
    again = StreamRun(ranks=2, seed=0, rows=4, columns=6, first_block=4, adapt_sink=False)
    assert ranks.runs[1] == replace(again, keep=ranks.runs[0].keep)
    prompt, image, displayed, param = next(begin for block, begin in ranks.begun[5:] if block == 4).updates
    assert prompt == PromptUpdate(text="second")
    assert isinstance(image, ReferenceUpdate), "of which models with speech keep more than the sink"
    assert isinstance(displayed, Reference)
    assert torch.equal(displayed.latents, sink(5))
    assert param == Parameter(name="audio_scale", value=0.5)


def test_a_reference_set_later_replaces_the_adaptive_sink() -> None:
    ranks = Ranks((0, 4))
    with session(ranks, blocks=6, credit=1).begin(ReferenceUpdate(image=IMAGE)) as stream:
        next(stream)
        stream.set_reference(IMAGE + 1, at=2)
        list(stream)
    (image,) = next(begin for block, begin in ranks.begun[5:] if block == 4).updates
    assert isinstance(image, ReferenceUpdate)
    assert torch.equal(image.image, IMAGE + 1)


def test_speakers_stay_where_they_are_under_another_reference() -> None:
    """Also after a death: the ranks that are new get the masks with the reference, whichever came with it."""
    masks, ranks = torch.ones(2, 8, 12, dtype=torch.uint8), Ranks((0, 4))
    first = ReferenceUpdate(image=IMAGE, masks=masks)
    with session(ranks, blocks=6, credit=1).begin(first) as stream:
        next(stream)
        stream.set_reference(IMAGE + 1, at=2)
        list(stream)
    (update,) = next(begin for block, begin in ranks.begun[5:] if block == 4).updates
    assert torch.equal(update.image, IMAGE + 1)
    assert update.masks is masks


def test_no_frame_is_held_while_the_ranks_are_well() -> None:
    """One that is held has no audio, which was heard."""
    with session(Ranks(), blocks=None, hold=0.001, track=whole(noise(2000))).begin() as stream:
        assert next(stream).audio is not None
        assert stream._on_timeout() is None
        stream.status = "degraded"
        held = stream._on_timeout()
        assert held is not None
        assert (held.is_held, held.audio) == (True, None)


def test_a_new_decoder_s_first_frame_is_shown_twice() -> None:
    """It gives one for its first latent frame, in the place of two."""
    stream, frames = session(Ranks()), torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 8, 12, 3)
    produced, begun = ProducedBlock(block=2, frames=frames, seconds=0.1, sink=None), BeginBlock(inputs=(), updates=())
    stream._epoch = 1
    stream._deliver(produced, begun, None)
    chunk = stream._items.popleft()
    assert chunk.frames[:, 0, 0, 0].tolist() == [0, 0, 1, 2]
    assert (chunk.block, chunk.epoch, chunk.latency, chunk.pts) == (2, 1, 0.1, 7 / 20)


def test_the_last_frame_is_held_while_the_stream_is_degraded() -> None:
    """Not before, and not without being asked for."""
    ranks, again = Ranks((0, 2)), threading.Event()
    run = ranks.run

    def slow_to_come_back(course: StreamRun, **talk: Any) -> list[Any]:
        assert course.first_block == 0 or again.wait(10)
        return run(course, **talk)

    ranks.run = slow_to_come_back  # type: ignore[method-assign]
    with session(ranks, blocks=4, hold=0.01).begin() as stream:
        chunks = [next(stream) for _ in range(4)]
        again.set()
        while (chunk := next(stream)).is_held:
            pass
        chunks += [chunk, *stream]
    assert [(c.block, c.is_held) for c in chunks] == [
        (0, False), (1, False), (1, True), (1, True), (2, False), (3, False),
    ]  # fmt: skip
    assert torch.equal(chunks[2].frames, chunks[1].frames[-1:])
    assert (chunks[2].pts, chunks[2].audio) == (6 / 20, None)
    assert stream.status == "finished"


def test_the_frame_that_is_held_is_a_copy() -> None:
    """Who gets a chunk may write to its frames; nor do they all stay in memory."""
    with session(Ranks(), blocks=1).begin() as stream:
        chunk = next(stream)
        held = stream._last
        assert held is not None
        chunk.frames.fill_(9)
        assert int(held.frames.max()) == 0


def test_a_first_stage_that_is_lost_is_told_what_blocks_before_it_have_changed() -> None:
    """Also those that have begun and not come out."""
    stream, changed = session(Ranks()), PromptUpdate(text="b", transition="blend", over=2)
    stream._known, stream._next_out = {"prompt": PromptUpdate(text="a")}, 1
    orders = {1: (changed,), 2: (), 3: ()}
    stream._sent = {block: (BeginBlock(inputs=(), updates=updates), None) for block, updates in orders.items()}
    stream._note_lost(LostStage(block=3, start=0, stop=1))
    assert stream._sent[3][0].updates == (PromptUpdate(text="b"),)


def test_a_pause_while_degraded_is_still_degraded() -> None:
    ranks, again = Ranks((0, 1)), threading.Event()
    run = ranks.run

    def slow_to_come_back(course: StreamRun, **talk: Any) -> list[Any]:
        assert course.first_block == 0 or again.wait(10)
        return run(course, **talk)

    ranks.run = slow_to_come_back  # type: ignore[method-assign]
    with session(ranks, blocks=3, hold=0.01).begin() as stream:
        next(stream)
        assert next(stream).is_held
        stream.pause()
        assert stream.status == "degraded"
        stream.resume()
        again.set()
        assert [chunk.block for chunk in stream if not chunk.is_held] == [1, 2]


def test_ranks_that_died_while_they_waited_get_one_order_for_a_block() -> None:
    """They would take a second one for that of the next block."""
    ranks, has_asked, go_on = Ranks(), threading.Event(), threading.Event()
    run = ranks.run

    def dies_waiting(course: StreamRun, on_event: Callable[[int, Any], None], on_start: Callable[[Any], None]) -> Any:
        if not has_asked.is_set():
            on_start(lambda rank, value: None)
            on_event(0, BlockReady(block=0))
            has_asked.set()
            raise WorkerDied("rank 1 was killed")
        assert go_on.wait(10)
        return run(course, on_event=on_event, on_start=on_start)

    ranks.run = dies_waiting  # type: ignore[method-assign]
    stream = session(ranks, blocks=2)
    stream.pause()
    with stream.begin():
        while stream.status != "degraded":
            time.sleep(0.01)
        stream.resume()
        go_on.set()
        assert [chunk.block for chunk in stream] == [0, 1]


def test_before_its_first_block_a_stream_begins_as_it_was() -> None:
    ranks = Ranks((0, 0))
    with session(ranks, blocks=2).begin(PromptUpdate(text="first")) as stream:
        assert [chunk.epoch for chunk in stream] == [1, 1]
    assert ranks.runs[1] == ranks.runs[0]
    assert [begin.updates for block, begin in ranks.begun if block == 0] == [(PromptUpdate(text="first"),)] * 2


def test_the_last_death_is_told_to_the_watcher() -> None:
    for restarts in (0, 2):
        ranks = Ranks(*((run, 1) for run in range(restarts + 1)))
        with session(ranks, restarts=restarts).begin() as stream:
            assert next(stream).block == 0
            with pytest.raises(WorkerDied, match="killed"):
                next(stream)
        assert stream.status == "failed"
        assert len(ranks.runs) == restarts + 1


def test_what_a_worker_raises_ends_the_stream_at_once() -> None:
    """A new worker would raise it again: the error is told, and no device is taken for a broken one."""
    for raised in (WorkerError("rank 1 raised RuntimeError: sizes differ"), WorkerOutOfMemory("rank 1 raised ...")):
        ranks = Ranks()
        run = ranks.run

        def fails(course: StreamRun, run: Any = run, raised: Exception = raised, **talk: Any) -> list[Any]:
            run(replace(course), **talk)
            raise raised

        ranks.run = fails  # type: ignore[method-assign]
        with session(ranks, blocks=2, restarts=3).begin() as stream:
            assert [next(stream).block for _ in range(2)] == [0, 1]
            with pytest.raises(type(raised), match="rank 1 raised"):
                next(stream)
        assert stream.status == "failed"
        assert len(ranks.runs) == 1


def test_a_timer_ends_with_its_stream() -> None:
    """Of a stream of a frame in an hour, the wait for its audio."""
    track = AudioTrack(replace(AUDIO, fps=1 / 3600), FRAMES, KeepAlive())
    with session(Ranks(), blocks=3, track=track).begin() as stream:
        give_up = time.monotonic() + 20
        while (timer := stream._timer) is None and time.monotonic() < give_up:
            time.sleep(0.01)
    assert timer is not None
    timer.join(10)
    assert not timer.is_alive()


def test_restarts_are_counted_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(base_session.time, "monotonic", lambda: now[0])
    ranks = Ranks((0, 1), (1, 2), (2, 3))
    with session(ranks, blocks=6, credit=1, restarts=1).begin() as stream:
        for block in range(3):
            assert next(stream).block == block
            while len(ranks.runs) < block + 2:  # the worker dies in the block that begins now
                time.sleep(0.01)
            now[0] += base_session.RENEWED + 1
        assert [chunk.block for chunk in stream] == [3, 4, 5]
    assert len(ranks.runs) == 4


def test_the_clock_paces_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    def sleep(_: StreamSession, seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(session_module, "time", Clock)
    monkeypatch.setattr(StreamSession, "_sleep", sleep)
    with session(Ranks(), blocks=5, pace="realtime").begin() as stream:
        next(stream), next(stream)
        now[0] += 1.0
        next(stream), next(stream)
    # A chunk that is a second late is shown at once, and the one after it follows at 1.1 times its speed.
    assert slept == [0.0, 3 / 20, 0.0, round(4 / 20 / 1.1, 6)]


def test_a_cancelled_stream_waits_for_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, waits = [], threading.Event()
    with session(Ranks(), blocks=5, pace="realtime").begin() as stream:
        stream._format = replace(FORMAT, fps=0.01)  # the next chunk is due in minutes
        next(stream)
        sleep = stream._sleep

        def noted(seconds: float) -> None:
            waits.set()
            sleep(seconds)

        monkeypatch.setattr(stream, "_sleep", noted)
        taking = threading.Thread(target=lambda: ends.append(next(stream, None)))
        taking.start()
        assert waits.wait(10)
        stream.cancel()
        taking.join(10)
        assert not taking.is_alive()


def test_an_interrupted_wait_keeps_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a notebook, say: after as many as there is credit the stream would stand still."""

    def interrupt(_: StreamSession, seconds: float) -> None:
        raise KeyboardInterrupt

    ranks = Ranks()
    with session(ranks, blocks=6, credit=1, pace="realtime").begin() as stream:
        with monkeypatch.context() as patch:
            patch.setattr(StreamSession, "_sleep", interrupt)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    next(stream)
        assert [chunk.block for chunk in stream] == [3, 4, 5]


def test_a_stream_of_some_seconds_has_the_fewest_blocks_that_hold_them() -> None:
    """At once also for decades; 0.56 s of 25 frames a second are 14 frames, though their product is a little more."""
    for frames in range(1, 60):
        blocks = FORMAT.blocks(frames / FORMAT.fps)
        assert blocks is not None
        assert FORMAT.first_frame(blocks) >= frames > FORMAT.first_frame(blocks - 1)
    decades = FORMAT.blocks(1e9)
    assert decades is not None
    assert FORMAT.first_frame(decades) >= 2e10 > FORMAT.first_frame(decades - 1)
    assert 0.56 * 25 > 14
    assert StreamFormat(fps=25, height=8, width=12, frames=14, per_latent=1).blocks(0.56) == 1
    assert FORMAT.blocks(torch.tensor(1.0)) == FORMAT.blocks(1)  # type: ignore[arg-type]
    for seconds in (0, -1, float("nan"), 1e10, float("inf"), True, "3", [3]):
        with pytest.raises(PlanError, match="above 0, and at most 1e"):
            FORMAT.blocks(seconds)  # type: ignore[arg-type]


def test_the_shortest_stream_has_one_block_and_numbers_of_any_library_are_taken() -> None:
    assert StreamFormat(fps=10, height=8, width=12, frames=1, per_latent=1).blocks(1e-9) == 1
    delivery = StreamDelivery(lead=np.int64(3), hold=torch.tensor(0.5))  # type: ignore[arg-type]
    assert (delivery.lead, delivery.hold) == (3, 0.5)
    assert (type(delivery.lead), type(delivery.hold)) == (int, float)


def test_the_first_block_has_fewer_frames() -> None:
    """Its first latent frame is one image."""
    assert [FORMAT.frames_of(block) for block in range(3)] == [3, 4, 4]
    assert [FORMAT.seconds(block) for block in range(3)] == [0, 3 / 20, 7 / 20]


def test_changes_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_driver, "MAX_UPDATES", 2)
    with session(Ranks(), blocks=None).begin() as stream:
        for at in (1000, 2000):
            stream.set_param("audio_scale", 0.5, at=at)
        with pytest.raises(PlanError, match="2 changes wait for blocks that have not begun"):
            stream.set_param("audio_scale", 0.5, at=3000)


def test_a_recording_may_have_any_number_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_driver, "MAX_UPDATES", 2)
    ranks, changes = Ranks(), [(block, PromptUpdate(text=str(block))) for block in range(6)]
    with session(ranks).begin(changes=changes) as stream:
        list(stream)
    assert [begin.updates for _, begin in ranks.begun] == [(update,) for _, update in changes]


# --- sound ---------------------------------------------------------------------------------------------------------


def heard(ranks: Ranks) -> Tensor:
    return torch.cat([begin.inputs[0] for _, begin in ranks.begun], 1)


def whole(samples: Tensor) -> AudioTrack:
    track = AudioTrack(AUDIO, FRAMES)
    track.push(samples, 2000)
    track.end()
    return track


def test_a_stream_is_as_long_as_its_audio() -> None:
    samples = noise(2000) * 0.3
    with session(Ranks(), blocks=None, track=whole(samples)).begin() as stream:
        chunks = list(stream)
    assert sum(len(chunk.frames) for chunk in chunks) == 23  # 20 frames of sound, and the rest of the last block
    played = torch.cat([chunk.audio for chunk in chunks if chunk.audio is not None])
    assert torch.equal(played[:2000], samples)
    assert not played[2000:].any()
    assert [len(chunk.audio) for chunk in chunks if chunk.audio is not None] == [len(c.frames) * 100 for c in chunks]


@pytest.mark.parametrize("count", [2000, 2999, 3000, 3001])
def test_a_file_is_read_no_further_than_its_blocks_need(count: int) -> None:
    """And gives the blocks of the same samples at once."""
    samples, read = noise(count) * 0.3, list[int]()

    def pieces() -> Iterator[Tensor]:
        for piece in samples.split(70):
            read.append(len(piece))
            yield piece

    track, at_once = AudioTrack(AUDIO, FRAMES), whole(samples)
    track.play(pieces())
    for block in range(20):
        assert track.is_over(block) == at_once.is_over(block)
        if track.is_over(block):
            break
        assert track.is_here(block)
        found, wanted = track.take(block), at_once.take(block)
        assert all(map(torch.equal, found, wanted))
        assert sum(read) <= FORMAT.first_frame(block + 1) * 100 + 70
        assert seconds_ahead(track) < 1
    assert sum(read) == count
    with pytest.raises(PlanError, match="the audio of this stream has ended"):
        track.push(samples, AUDIO.rate)


def test_an_interruption_ends_a_file() -> None:
    track = AudioTrack(AUDIO, FRAMES)
    track.play(iter(noise(3000).split(100)))
    track.take(0)
    track.end()
    assert not track.is_over(1), "what is played ends by itself"
    track.interrupt(1)
    assert track.is_over(1)


def test_a_stream_has_no_block_of_silence_after_its_audio() -> None:
    """Where frames take no whole number of samples, blocks end between two."""
    config = AudioConfig(dim=24, heads=2, after=(0,), rate=1000, fps=24)
    track = AudioTrack(config, FRAMES)
    track.push(torch.ones(50), config.rate)
    track.end()
    assert FRAMES / 24 * 1000 > 50
    track.take(0)
    assert track.is_over(1)


def test_audio_of_any_device_is_heard() -> None:
    """A copy in host memory: the samples of a stream wait there for their blocks."""
    samples = noise(900) * 0.3
    for given in (elsewhere(samples), elsewhere(samples.expand(2, -1)), samples.clone().requires_grad_()):
        track = AudioTrack(AUDIO, FRAMES)
        track.push(given, AUDIO.rate)
        for found, wanted in zip(track.take(0), whole(samples).take(0), strict=True):
            assert (type(found), found.requires_grad) == (Tensor, False)
            assert torch.equal(found, wanted)


def test_live_audio_is_heard_as_it_comes_and_as_if_it_had_been_there() -> None:
    samples = noise(2000) * 0.3
    together, piecewise = Ranks(), Ranks()
    with session(together, blocks=None, track=whole(samples)).begin() as stream:
        list(stream)
    with session(piecewise, blocks=None, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        blocks = []
        for piece in samples.split(170):
            effect = stream.push_audio(piece, 2000)
            assert effect.block <= 5
            while len(blocks) < effect.block:
                blocks.append(next(stream).block)
        stream.end_audio()
        blocks += [chunk.block for chunk in stream]
    assert blocks == list(range(6))
    assert torch.equal(heard(together), heard(piecewise))


def test_no_block_begins_before_its_audio() -> None:
    ranks = Ranks()
    with session(ranks, blocks=None, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        assert ranks.idle.wait(10)
        stream.push_audio(torch.zeros(299), 2000)
        assert not ranks.begun
        stream.push_audio(torch.zeros(1), 2000)
        assert next(stream).block == 0
        assert len(ranks.begun) == 1


def seconds_ahead(track: AudioTrack) -> float:
    """Audio that the track holds."""
    return (track._samples.end - track._samples.start) / AUDIO.rate


def test_a_push_costs_the_same_with_much_audio_waiting() -> None:
    """A piece is copied when it comes, and never again, however many there are."""
    track, kept = AudioTrack(AUDIO, FRAMES), []
    for piece in noise(50_000).split(40):
        track.push(piece, AUDIO.rate)
        kept.append(track._samples._pieces[-1].data_ptr())
    assert [piece.data_ptr() for piece in track._samples._pieces] == kept


def test_an_interruption_drops_what_nobody_has_begun_to_say() -> None:
    """The next block speaks what is pushed then, with the frames before it that it needs."""
    first, second = noise(4000) * 0.3, noise(1000, seed=1) * 0.3
    ranks = Ranks()
    with session(ranks, blocks=None, credit=1, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        stream.push_audio(first, AUDIO.rate)
        played = [next(stream)]
        effect = stream.interrupt()
        stream.push_audio(second, AUDIO.rate)
        stream.end_audio()
        played += list(stream)
    begin = round(effect.seconds * AUDIO.rate)
    assert 0 < begin < 2000, "most of it was not said"
    wanted = torch.cat([first[:begin], second])
    assert torch.equal(torch.cat([chunk.audio for chunk in played if chunk.audio is not None])[: len(wanted)], wanted)
    again = Ranks()
    with session(again, blocks=None, track=whole(wanted)).begin() as stream:
        list(stream)
    assert torch.equal(heard(ranks), heard(again))


def test_audio_of_another_rate_ends_with_its_last_sample_and_at_an_interruption_at_once() -> None:
    """The filter between rates holds back some of it."""
    track, double = AudioTrack(AUDIO, FRAMES), 2 * AUDIO.rate
    track.push(torch.ones(2000), double)
    track.push(torch.ones(500), AUDIO.rate)
    assert track.seconds_from(0) == pytest.approx((1000 + 500) / AUDIO.rate)
    track.push(torch.ones(2000), double)
    track.interrupt(0)
    track.push(torch.zeros(8000), double)
    assert not track.take(0)[1].any()


def test_without_audio_a_stream_is_kept_alive_by_silence() -> None:
    """A block waits for its audio as long as the audio may still come in time, and no longer."""
    now = [50.0]
    track = AudioTrack(AUDIO, FRAMES, KeepAlive(lambda: now[0]))
    assert not track.is_here(0)
    assert track.seconds_until_silence(0) == pytest.approx(3 / 20 + MARGIN)
    now[0] += 3 / 20 + MARGIN
    assert track.is_here(0)
    assert not track.take(0)[1].any()
    assert not track.is_here(1), "the next one is expected a block later"
    track.push(torch.ones(2000), AUDIO.rate)
    assert track.is_here(1)
    assert track.take(1)[1].all(), "speech begins with the next block"
    assert AudioTrack(AUDIO, FRAMES).seconds_until_silence(0) is None


def test_a_stream_that_is_kept_alive_goes_on_by_itself() -> None:
    track = AudioTrack(AUDIO, FRAMES, KeepAlive())
    with session(Ranks(), blocks=3, track=track).begin() as stream:
        chunks = list(stream)
    assert [chunk.block for chunk in chunks] == [0, 1, 2]
    assert not any(chunk.audio.any() for chunk in chunks if chunk.audio is not None)


def test_a_stream_is_kept_alive_after_speech_that_came_in_time() -> None:
    """The wait for the first block's audio is still under way when the second begins to wait for its own."""
    track = AudioTrack(AUDIO, FRAMES, KeepAlive())
    with session(Ranks(), blocks=3, credit=3, track=track).begin() as stream:
        stream.push_audio(noise(300) * 0.3, AUDIO.rate)
        assert [chunk.block for chunk in stream] == [0, 1, 2]


def test_a_slow_consumer_is_warned_and_a_pause_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    with session(Ranks(), blocks=9, pace="realtime").begin() as stream:
        next(stream)
        stream.pause()
        time.sleep(0.8)
        stream.resume()
        next(stream)
        assert stream.behind == 0.0
        assert not caplog.records
        time.sleep(0.8)
        next(stream), next(stream)
        assert stream.behind > 0.5
        (record,) = caplog.records
    assert "s late; those after it follow at 1.1 times their speed" in record.getMessage()


@pytest.mark.parametrize(("output", "warns"), [("block", True), ("skip_to_live", False)])
def test_who_drops_chunks_is_not_told_that_they_come_late(
    output: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock hears of what was dropped, and goes on live at once."""

    class Late(RealtimeClock):
        dropped, behind = 0, 0.0  # type: ignore[assignment]

        def due(self, pts: float, now: float, dropped: int) -> float:
            self.dropped, self.behind = dropped, 9.0  # type: ignore[misc]
            return now

    with session(Ranks(), blocks=4, pace="realtime", output=output).begin() as stream:
        stream._clock, stream.dropped = Late(), 3
        next(stream)
        assert stream._clock.dropped >= 3
    assert bool(caplog.records) == warns


def test_a_stream_may_go_on_while_it_is_decided_when_a_chunk_is_due() -> None:
    """By another thread, as a server has for controls: the chunk keeps the clock that it began with."""
    with session(Ranks(), blocks=None, pace="realtime").begin() as stream:

        class Pts(float):
            def __sub__(self, other: float) -> float:
                stream.resume()
                return float(self) - other

        next(stream)
        stream._wait_until_due(replace(next(stream), pts=Pts(0.1)))
        assert next(stream).block == 2


@pytest.mark.parametrize(("output", "is_whole"), [("block", True), ("skip_to_live", False)])
def test_audio_that_is_sent_ahead_is_played_whole(output: str, is_whole: bool) -> None:
    """By ranks that are faster than time, unless chunks may be dropped, which is for those that are slower."""
    track = AudioTrack(AUDIO, FRAMES)
    with session(Ranks(), blocks=None, track=track, pace="realtime", output=output).begin() as stream:
        stream.push_audio(torch.zeros(2000), 2000)
        stream.end_audio()
        blocks = [chunk.block for chunk in stream]
    assert (stream.dropped == 0) == is_whole
    assert (blocks == [0, 1, 2, 3, 4, 5]) == is_whole


def test_audio_that_is_ahead_is_known_and_an_interruption_drops_it() -> None:
    track = AudioTrack(AUDIO, FRAMES)
    with session(Ranks(), blocks=None, credit=1, track=track).begin() as stream:
        assert stream.audio_ahead == 0.0
        stream.push_audio(torch.zeros(40_000), 2000)
        next(stream)
        assert 18 < stream.audio_ahead < 20, "20 s, but for a block or two"
        stream.interrupt()
        assert stream.audio_ahead == 0.0
    with session(Ranks(), blocks=1).begin() as silent:
        assert silent.audio_ahead == 0.0


def test_audio_does_not_pile_up() -> None:
    track = AudioTrack(AUDIO, FRAMES)
    with session(Ranks(), blocks=50, track=track).begin() as stream:
        for _ in range(50):
            stream.push_audio(torch.zeros(400), 2000)
            next(stream)
            assert seconds_ahead(track) < 0.5


@pytest.mark.parametrize("rate", [1000, 3000, 8000])
def test_other_rates_are_brought_to_the_model_s(rate: int) -> None:
    track = AudioTrack(AUDIO, FRAMES)
    track.push(torch.ones(2, rate), rate)
    track.end()
    assert seconds_ahead(track) == pytest.approx(1.0)
    assert track.take(0)[1].tolist() == pytest.approx([1.0] * 300, abs=1e-3)


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (torch.zeros(9, 5), 2000, "at most 8 channels"),
        (torch.zeros(5), 12, "12 samples per second"),
        (torch.zeros(5, dtype=torch.int16), 2000, "int16"),
        (torch.full((5,), float("nan")), 2000, "no numbers"),
    ],
)
def test_audio_that_cannot_be_is_refused(samples: Tensor, rate: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        AudioTrack(AUDIO, FRAMES).push(samples, rate)
