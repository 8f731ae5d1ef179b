"""What a stream's driver orders in cases that are rare: deaths, ends between two runs, and what comes after the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError, WorkerDied
from patchpar.stream import base_session
from patchpar.stream.audio_track import AudioTrack, KeepAlive
from patchpar.stream.delivery import StreamDelivery
from patchpar.stream.driver import with_updates
from patchpar.stream.events import Reference
from patchpar.stream.messages import (
    BeginBlock,
    BlockReady,
    CancelStream,
    LostStage,
    ProducedBlock,
    PromptUpdate,
    ReferenceUpdate,
)
from patchpar.stream.session import StreamSession
from patchpar.stream.stage import StageStats
from patchpar.stream.video_source import FrameSources, VideoSource
from tests.stream.test_live_inputs import until
from tests.stream.test_session import COURSE, FORMAT, IMAGE, Ranks, session
from tests.stream.tiny import AUDIO, FRAMES, sink

SETTLING = replace(COURSE, settles=2)
PRODUCED = ProducedBlock(block=0, frames=torch.zeros(3, 8, 12, 3, dtype=torch.uint8), seconds=0.1, sink=None)


def updates_of(ranks: Ranks, run: int, block: int) -> tuple[Any, ...]:
    """What a block was begun with the last time."""
    return [begin.updates for number, begin in ranks.begun if number == block][run]


@pytest.mark.parametrize(("block", "continues"), [(2, False), (3, True)])
def test_ranks_that_live_go_on_as_they_are_once_a_stream_has_settled(block: int, continues: bool) -> None:
    """They have the conditions then. Before, all begin anew, and are told them."""
    ranks = Ranks((0, block))
    with session(ranks, credit=1, courses=(SETTLING,)).begin(PromptUpdate(text="a")) as stream:
        assert [chunk.block for chunk in stream] == list(range(6))
    first, again = ranks.runs
    assert again == replace(first, first_block=block, continues=continues, adapt_sink=False)
    assert bool(updates_of(ranks, 1, block)) is not continues


@pytest.mark.parametrize(("block", "continues"), [(3, False), (4, True)])
def test_a_stream_that_began_anew_settles_anew(block: int, continues: bool) -> None:
    ranks = Ranks((0, 1), (1, block))
    with session(ranks, credit=1, restarts=2, courses=(SETTLING,)).begin() as stream:
        assert [chunk.block for chunk in stream] == list(range(6))
    assert [run.continues for run in ranks.runs] == [False, False, continues]


@pytest.mark.parametrize(("block", "continues"), [(6, False), (7, True)])
def test_a_stream_that_begins_in_the_middle_settles_after_as_many_blocks(block: int, continues: bool) -> None:
    ranks, course = Ranks((0, block)), replace(SETTLING, first_block=4, adapt_sink=False)
    with session(ranks, blocks=9, credit=1, courses=(course,)).begin() as stream:
        assert [chunk.block for chunk in stream] == [4, 5, 6, 7, 8]
    assert [run.continues for run in ranks.runs] == [False, continues]


def test_an_adaptive_sink_that_never_came_is_made_by_those_that_begin_anew() -> None:
    ranks = Ranks((0, 0))
    with session(ranks, courses=(SETTLING,)).begin() as stream:
        list(stream)
    assert ranks.runs[1].adapt_sink


def test_each_stage_keeps_all_blocks_in_flight_and_the_one_before() -> None:
    """Whose conditions a stage gets that has lost its own."""
    ranks, courses = Ranks(), (COURSE, replace(COURSE, first_block=2))
    with session(ranks, credit=3, courses=courses).begin() as stream:
        list(stream)
    assert [run.keep for run in ranks.runs] == [4, 4]


def test_a_run_ends_where_the_next_one_begins() -> None:
    ranks, courses = Ranks(), (COURSE, replace(COURSE, first_block=2))
    with session(ranks, blocks=4, courses=courses).begin() as stream:
        assert [(chunk.block, chunk.epoch) for chunk in stream] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [run.first_block for run in ranks.runs] == [0, 2]


@pytest.mark.parametrize("ends", [StreamSession.stop, StreamSession.cancel])
def test_no_further_run_begins_after_the_end(ends: Any) -> None:
    ranks, courses = Ranks(), (COURSE, replace(COURSE, first_block=5))
    with session(ranks, blocks=9, credit=1, courses=courses).begin() as stream:
        next(stream)
        ends(stream)
        assert len(list(stream)) <= 2
    assert len(ranks.runs) == 1


def test_a_stream_that_goes_on_is_degraded_no_more() -> None:
    with session(Ranks((0, 1)), blocks=None, credit=1).begin() as stream:
        assert [next(stream).epoch for _ in range(2)] == [0, 1]
        assert stream.status == "running"
        stream.pause()
    with session(Ranks((0, 1)), blocks=None, credit=1).begin() as stream:
        next(stream)
        stream.pause()
        assert next(stream).epoch in (0, 1)
        assert stream.status == "paused"


def test_nothing_is_delivered_or_begun_after_the_end() -> None:
    """Of ranks that have not heard of it yet."""
    stream, sent = session(Ranks()), list[Any]()
    stream._on_start(lambda rank, value: sent.append(value))
    stream._on_event(0, BlockReady(block=0))
    stream.pause()
    stream._on_event(0, BlockReady(block=1))
    stream.cancel()
    stream._set_paused(False)
    stream._on_event(1, PRODUCED)
    assert [type(word) for word in sent] == [BeginBlock, CancelStream, CancelStream]
    assert not stream._items


def test_a_stream_that_is_cancelled_while_a_rank_dies_is_not_resumed() -> None:
    ranks, may_die = Ranks(), threading.Event()

    def dies(*_: Any, **__: Any) -> list[Any]:
        assert may_die.wait(10)
        raise WorkerDied("rank 1 was killed")

    ranks.run = dies  # type: ignore[method-assign]
    with session(ranks, restarts=3).begin() as stream:
        stream.cancel()
        may_die.set()
        assert stream.is_free_within(10)
    assert (stream.status, stream._error) == ("cancelled", None)


def test_a_stream_that_waits_for_audio_is_stopped() -> None:
    """Its ranks have asked for an order already, and ask for no other."""
    ranks = Ranks()
    with session(ranks, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        assert ranks.idle.wait(10)
        stream.stop()
        assert list(stream) == []
    assert stream.status == "finished"


def test_who_waits_for_a_chunk_is_told_of_the_end_while_the_ranks_compute() -> None:
    ranks, waits, go, taken = Ranks(), threading.Event(), threading.Event(), list[Any]()

    def busy(*_: Any, **__: Any) -> list[Any]:
        assert go.wait(30)
        return []

    def take() -> None:
        waits.set()
        taken.append(next(stream, None))

    ranks.run = busy  # type: ignore[method-assign]
    with session(ranks).begin() as stream:
        taking = threading.Thread(target=take)
        taking.start()
        assert waits.wait(10)
        taking.join(0.2)  # until it waits
        stream.cancel()
        taking.join(10)
        assert taken == [None]
        go.set()


def test_a_stream_is_closed_when_its_ranks_are_free_and_says_where_they_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, go = Ranks(), threading.Event()

    def busy(*_: Any, **__: Any) -> list[Any]:
        assert go.wait(30)
        return []

    ranks.run = busy  # type: ignore[method-assign]
    monkeypatch.setattr(base_session, "CLOSE_SECONDS", 0.1)
    stream = session(ranks).begin()
    with pytest.raises(PlanError, match=r"did not end the stream within 0\.1 s: close the pipeline"):
        stream.close()
    monkeypatch.setattr(base_session, "CLOSE_SECONDS", 20.0)
    threading.Timer(0.2, go.set).start()
    stream.close()
    assert stream.is_free_within(0)


def test_a_wait_for_audio_has_one_timer_however_often_audio_comes() -> None:
    track = AudioTrack(replace(AUDIO, fps=1 / 3600), FRAMES, KeepAlive())
    with session(Ranks(), blocks=3, track=track).begin() as stream:
        until(lambda: stream._timer is not None)
        before = stream._timer
        for _ in range(3):
            stream.push_audio(torch.zeros(5), AUDIO.rate)
        assert stream._timer is before


def test_audio_that_fails_ends_the_stream_with_its_error_and_no_credit_is_lost() -> None:
    class Broken(AudioTrack):
        def take(self, block: int) -> tuple[Tensor, Tensor]:
            if block == 2:
                raise ValueError("the file is damaged")
            return super().take(block)

    track = Broken(AUDIO, FRAMES)
    track.be_silent()
    ranks, courses = Ranks(), (COURSE, replace(COURSE, first_block=4))
    with session(ranks, track=track, courses=courses).begin() as stream:
        assert [next(stream).block for _ in range(2)] == [0, 1]
        with pytest.raises(ValueError, match="the file is damaged"):
            next(stream)
        assert (stream.status, stream.in_flight, len(ranks.runs)) == ("failed", 0, 1)


def test_videos_are_read_no_further_than_their_stream_and_their_files_are_closed() -> None:
    closed = [threading.Event(), threading.Event()]

    def endless(closed: threading.Event) -> Iterator[Tensor]:
        try:
            while True:
                yield IMAGE
        finally:
            closed.set()

    video, pose = (VideoSource(endless(each), FORMAT.frames_of) for each in closed)
    frames = FrameSources(video=video, pose=pose)
    with StreamSession(
        Ranks().run, (COURSE,), FORMAT, StreamDelivery(), None, frames, credit=1, blocks=2
    ).begin() as stream:
        assert [chunk.block for chunk in stream] == [0, 1]
        assert all(each.wait(10) for each in closed), "though the session is still there"


def test_a_stream_ends_with_its_video() -> None:
    video = VideoSource(iter(IMAGE.expand(FORMAT.first_frame(2), -1, -1, -1)), FORMAT.frames_of)
    frames = FrameSources(video=video)
    with StreamSession(Ranks().run, (COURSE,), FORMAT, StreamDelivery(), None, frames, credit=1).begin() as stream:
        assert [chunk.block for chunk in stream] == [0, 1]


def test_figures_of_the_stages_are_there_after_the_end() -> None:
    ranks, figures = Ranks(), [StageStats(rank=rank, blocks=6, busy=1.0, waited=0.5) for rank in (0, 1)]
    run = ranks.run
    ranks.run = lambda course, **talk: [*run(course, **talk), figures[0], None, figures[1]]  # type: ignore[method-assign]
    with session(ranks).begin() as stream:
        list(stream)
    assert stream.figures == tuple(figures)


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_first_stage_that_is_lost_is_told_what_held_before_the_block_s_own_changes(is_sent: bool) -> None:
    """And not these twice: a prompt that was there already would blend into itself."""
    stream, before = session(Ranks()), PromptUpdate(text="a")
    own = PromptUpdate(text="b", transition="blend", over=2)
    stream._known, stream._next_out = {"prompt": before}, 3
    if is_sent:
        stream._sent[3] = BeginBlock(inputs=(), updates=(own,)), None
    else:
        stream._update(own, 3)
    stream._note_lost(LostStage(block=3, start=0, stop=1))
    assert tuple(stream._sent[3][0].updates if is_sent else stream._updates[3]) == (before, own)


def test_masks_of_another_kind_of_reference_are_not_taken() -> None:
    """Those of an image are pixels, those of latents patches."""
    image = ReferenceUpdate(image=IMAGE, masks=torch.ones(2, 8, 12, dtype=torch.uint8))
    known = with_updates({}, [image, Reference(latents=sink(1))])
    assert known["reference"].masks is None  # type: ignore[union-attr]
