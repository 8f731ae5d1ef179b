"""Streams whose stages have GPUs: the frames of one rank, through the host's memory on one card and NCCL on several."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import StreamDelivery
from tests.stream.test_resume import FACE
from tests.stream.tiny import write_folder

pytestmark = pytest.mark.gpu
BLOCKS, PER_BLOCK, FPS = 6, 4, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("face"))


def frames_on(devices: list[str], folder: Path, *, killed: int | None = None) -> tuple[list[Any], list[bool]]:
    """Frames of a stream with a prompt, a parameter and a reference changed in mid-stream, and who is as before."""
    seconds = (1 + PER_BLOCK * BLOCKS - 2) / FPS
    delivery = StreamDelivery(lead=1, restarts=9)
    with (
        StreamingPipeline.from_pretrained(folder, devices=devices, deadline=60, torch_dtype="float32") as pipe,
        pipe.stream("a fox", reference=FACE, seed=5, seconds=seconds, delivery=delivery) as stream,
    ):
        stream.set_prompt("a hen", at=2, transition="recache")
        stream.set_param("audio_scale", 2.0, at=3)
        stream.set_reference(255 - FACE, at=4)
        found, before = [next(stream)], pipe._workers.pids
        if killed is not None:
            os.kill(before[killed], signal.SIGKILL)
        found += list(stream)
        after = pipe._workers.pids
    return [chunk.frames for chunk in found], [a == b for a, b in zip(before, after, strict=True)]


def apart(one: list[Any], other: list[Any]) -> int:
    return max(int((a.int() - b.int()).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("number", [2, 3])
def test_stages_on_one_card(kind: str, folder: Path, number: int) -> None:
    device = "cpu" if kind == "cpu" else f"{kind}:0"
    one, _ = frames_on([device], folder)
    several, _ = frames_on([device] * number, folder)
    assert apart(several, one) == 0


def test_a_stage_that_is_killed_on_one_card(kind: str, folder: Path) -> None:
    device = "cpu" if kind == "cpu" else f"{kind}:0"
    frames, stayed = frames_on([device] * 3, folder, killed=1)
    assert len(frames) == BLOCKS
    assert stayed == [True, False, True]


@pytest.mark.parametrize("killed", [None, 1])
def test_stages_with_a_card_each(cards: Callable[..., list[str]], folder: Path, killed: int | None) -> None:
    """Latents go through NCCL, also after a rank has been started anew."""
    devices = cards(least=3, most=3, on_cpu=3)
    frames, stayed = frames_on(devices, folder, killed=killed)
    assert stayed == [True, killed is None, True]
    if killed is None:
        assert apart(frames, frames_on(devices[:1], folder)[0]) == 0
