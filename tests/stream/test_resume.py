"""Ranks that are killed in mid-stream: they alone are started anew, and the others keep what they have."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import Chunk, StreamDelivery
from patchpar.stream.messages import LostStage
from patchpar.stream.recording import StreamRecording
from patchpar.stream.session import StreamSession

FACE = torch.arange(8 * 12 * 3, dtype=torch.uint8).view(8, 12, 3)
SETTLED = 4


def after_kills(pipe: StreamingPipeline, stream: StreamSession, ranks: list[int], blocks: int) -> list[Chunk]:
    """Take `blocks` chunks, and kill a rank before each few of them."""
    taken = [next(stream) for _ in range(SETTLED)]
    every = (blocks - SETTLED) // (len(ranks) + 1)
    for rank in ranks:
        before = pipe._workers.pids
        os.kill(before[rank], signal.SIGKILL)
        epoch = taken[-1].epoch
        while taken[-1].epoch == epoch:
            taken.append(next(stream))
        taken += [next(stream) for _ in range(max(0, every - 3))]
        now = pipe._workers.pids
        assert [a == b for a, b in zip(before, now, strict=True)] == [other != rank for other in range(len(now))]
    return [*taken, *stream]


def replayed(pipe: StreamingPipeline, recording: StreamRecording) -> list[int]:
    """The blocks that are not those of the recording."""
    with pipe.replay(recording) as stream:
        return [chunk.block for chunk in stream if not recording.is_as_it_was(chunk)]


def first_difference(pipe: StreamingPipeline, recording: StreamRecording) -> int | None:
    """The first block that is not that of the recording; the stream ends there."""
    with pipe.replay(recording) as stream:
        return next((chunk.block for chunk in stream if not recording.is_as_it_was(chunk)), None)


def kinds(recording: StreamRecording) -> list[tuple[int, int, bool, bool]]:
    return [(lost.start, lost.stop, lost.decodes, lost.refills) for block in recording.blocks for lost in block.lost]


def test_only_the_dead_rank_is_started_anew(face_folder: Path, one: StreamingPipeline, tmp_path: Path) -> None:
    """First step, second step, decoder: no block is lost, and a replay on one rank has the same bits."""
    blocks = 40
    delivery = StreamDelivery(lead=1, restarts=9, record=tmp_path / "a.jsonl")
    with (
        StreamingPipeline.from_pretrained(face_folder, devices="cpu:3", deadline=30) as three,
        three.stream("a fox", reference=FACE, seed=5, seconds=(1 + 4 * blocks - 2) / 20, delivery=delivery) as stream,
    ):
        stream.set_prompt("a hen", at=7)
        stream.set_param("audio_scale", 2.0, at=9)
        chunks = after_kills(three, stream, [1, 0, 2], blocks)
        assert three.plan.ranks == 3
    assert [chunk.block for chunk in chunks] == list(range(len(chunks)))
    assert {len(chunk.frames) for chunk in chunks[1:]} == {4}
    assert chunks[-1].epoch == 3
    recording = StreamRecording.read(tmp_path / "a.jsonl")
    assert kinds(recording) == [(1, 2, False, False), (0, 1, False, False), (2, 2, True, True)]
    assert replayed(one, recording) == []
    losses = [block.block for block in recording.blocks if block.lost]
    nothing = replace(recording, blocks=tuple(replace(block, lost=()) for block in recording.blocks))
    assert first_difference(one, nothing) == losses[0], "the control: a window was lost there"
    everything = tuple(
        replace(block, lost=(LostStage(block=block.block, start=0, stop=2),) if block.lost else ())
        for block in recording.blocks
    )
    everywhere = replace(recording, blocks=everything)
    assert first_difference(one, everywhere) == losses[0], "the control: and no other window"


@pytest.mark.breadth
def test_many_kills_of_random_ranks(face_folder: Path, one: StreamingPipeline, tmp_path: Path) -> None:
    chance, kills = random.Random(1), 6
    delivery = StreamDelivery(lead=1, restarts=1000, record=tmp_path / "a.jsonl")
    blocks = 12 * kills
    with (
        StreamingPipeline.from_pretrained(face_folder, devices="cpu:3", deadline=30) as three,
        three.stream(reference=FACE, seed=5, seconds=4 * blocks / 20, delivery=delivery) as stream,
    ):
        chunks = after_kills(three, stream, [chance.randrange(3) for _ in range(kills)], blocks)
    assert [chunk.block for chunk in chunks] == list(range(len(chunks)))
    assert chunks[-1].epoch == kills
    assert replayed(one, StreamRecording.read(tmp_path / "a.jsonl")) == []
