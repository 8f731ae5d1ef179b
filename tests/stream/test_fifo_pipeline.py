"""A folder and a prompt in, video without end out: the frames of one process, on any ranks, with the usual controls."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.errors import LaunchError, PlanError, UnsupportedModel
from patchpar.launch.devices import Devices
from patchpar.models.streaming.fifo.queue import FifoConfig, FifoOptions
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal import pipeline as causal_pipeline
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import Chunk, StreamDelivery
from patchpar.stream.fifo import pipeline as fifo_pipeline
from patchpar.stream.fifo.pipeline import ENGINE, FifoSession, FifoStreamingPipeline
from patchpar.stream.images import pipeline as images_pipeline
from patchpar.stream.images.pipeline import ImageStreamingPipeline
from patchpar.stream.messages import PromptUpdate
from patchpar.stream.worker_group import ModelLoading, WorkerGroup
from tests.breadth import first_of
from tests.stream.on_pool import PoolExecutor
from tests.stream.tiny import COLUMNS, ROWS, TEXT

QUEUE = FifoOptions(window=4, partitions=2, first_steps=2)
CONFIG = FifoConfig(fps=20, height=2 * ROWS, width=2 * COLUMNS, queue=QUEUE, text_tokens=TEXT)


@pytest.fixture(scope="module")
def alone(face_folder: Path) -> Iterator[FifoStreamingPipeline]:
    with FifoStreamingPipeline.from_pretrained(face_folder, devices="cpu", config=CONFIG) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def spread(face_folder: Path, ranks: Any) -> FifoStreamingPipeline:
    """Zones 0-1 and 2-3, and decoding, on ranks 0 to 2 of the pool; rank 3 has no part."""
    plan = StreamPlan(sizes=(2, 2), decode="own")
    executor: Any = PoolExecutor(ranks, "fifo", ENGINE)
    facts = executor.call("load", str(face_folder), CONFIG, plan, {})[0]
    loading = ModelLoading(
        folder=str(face_folder), config=CONFIG, options={}, devices=("cpu",) * 3, deadline=60, engine=ENGINE
    )
    return FifoStreamingPipeline(WorkerGroup(executor, plan, loading), CONFIG, facts)


def frames(pipe: FifoStreamingPipeline, **arguments: Any) -> list[Tensor]:
    """Of 11 latent frames: one image, and then two each. Another prompt in mid-stream."""
    with pipe.stream("a fox", **{"seed": 3, "seconds": 1.0, **arguments}) as session:
        session.set_prompt("a hen", at=6)
        chunks = list(session)
    assert [chunk.pts for chunk in chunks] == [max(0, 2 * number - 1) / 20 for number in range(len(chunks))]
    return [chunk.frames for chunk in chunks]


def same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    assert len(one) == len(other)
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def test_ranks_show_the_frames_of_one_process(alone: FifoStreamingPipeline, spread: FifoStreamingPipeline) -> None:
    wanted = frames(alone, negative_prompt="blue", guidance_scale=3.0)
    assert len(wanted) == 11
    assert all(same(frames(spread, negative_prompt="blue", guidance_scale=3.0), wanted))
    for other in ({"negative_prompt": "red", "guidance_scale": 3.0}, {"guidance_scale": 1.0}):
        found = frames(alone, seconds=0.15, **other)
        assert len(found) == 2
        assert not any(same(found, wanted[:2]))


@pytest.mark.parametrize("kind", [FifoStreamingPipeline, StreamingPipeline])
def test_accelerators_load_bfloat16(kind: Any, face_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 billion weights take 56 GB in float32."""
    asked = []

    def start(loading: ModelLoading, plan: StreamPlan, devices: Any) -> None:
        asked.append(loading.options.get("torch_dtype"))
        raise LaunchError("there is none")

    monkeypatch.setattr(ModelLoading, "start", start)
    for module in (fifo_pipeline, causal_pipeline):
        monkeypatch.setattr(module, "resolve_devices_of_task", lambda names: Devices(names=tuple(names), note=""))
    for devices in (["cuda:0"], ["cpu"]):
        with pytest.raises(LaunchError):
            kind.from_pretrained(face_folder, devices=devices)
    with pytest.raises(LaunchError):
        kind.from_pretrained(face_folder, devices=["cuda:0"], torch_dtype="float32")
    assert asked == ["bfloat16", None, "float32"]


@pytest.mark.parametrize("kind", [StreamingPipeline, FifoStreamingPipeline, ImageStreamingPipeline])
def test_several_tasks_of_slurm_do_not_each_start_all_workers(
    kind: Any, face_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that names a device of its own does: as the control shows, which gets as far as to its workers."""

    def start(*given: Any, **named: Any) -> None:
        raise LaunchError("begun")

    monkeypatch.setattr(ModelLoading, "start", start)
    monkeypatch.setattr(images_pipeline, "start_ranks", start)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(PlanError, match="task 1 of 4 that srun has started"):
        kind.from_pretrained(face_folder, devices="cpu:2")
    with pytest.raises(LaunchError, match="begun"):
        kind.from_pretrained(face_folder, devices="cpu")


def test_it_can_be_cancelled_and_begun_again(spread: FifoStreamingPipeline) -> None:
    first = frames(spread)
    with spread.stream("a fox", seed=3) as session:  # without an end
        next(session)
        with pytest.raises(PlanError, match="a stream is running"):
            spread.stream("another")
        session.cancel()
    assert session.status == "cancelled"
    assert all(same(frames(spread), first))


def frames_from(pipe: FifoStreamingPipeline, first: int, end: int, **prompts: int) -> list[Tensor]:
    """Those of a stream that begins at block `first`, with these prompts from their blocks on."""
    run = replace(pipe._stream_run(3, adapt_sink=False), first_block=first)
    form, credit = pipe._format(CONFIG.fps, 1), QUEUE.levels + 2
    begun = FifoSession(pipe._workers.run, (run,), form, StreamDelivery(), None, credit=credit, blocks=end)
    with begun as session:
        session.begin(changes=[(block, PromptUpdate(text=f"a {name}")) for name, block in prompts.items()])
        return [chunk.frames for chunk in session]


@pytest.mark.parametrize("rank", first_of(range(3), 1))
def test_after_a_killed_rank_another_video_begins(rank: int, face_folder: Path, alone: FifoStreamingPipeline) -> None:
    """No block is lost or comes twice, and no other worker is started anew; but nothing of the queue is kept."""
    end, prompt_block = 25, 14
    with (
        FifoStreamingPipeline.from_pretrained(face_folder, devices="cpu:3", config=CONFIG, deadline=60) as three,
        three.stream(
            "a fox", seed=3, seconds=(2 * end - 1) / 20, guidance_scale=1.0, delivery=StreamDelivery(lead=1)
        ) as stream,
    ):
        stream.set_prompt("a hen", at=prompt_block)
        chunks: list[Chunk] = [next(stream) for _ in range(8)]
        before = three._workers.pids
        os.kill(before[rank], signal.SIGKILL)
        chunks += stream
        now = three._workers.pids
        assert three.plan.ranks == 3
    assert [a == b for a, b in zip(before, now, strict=True)] == [other != rank for other in range(3)]
    assert [chunk.block for chunk in chunks] == list(range(end))
    assert [len(chunk.frames) for chunk in chunks] == [1] + [2] * (end - 1)
    anew = next(chunk.block for chunk in chunks if chunk.epoch)
    assert 8 <= anew < prompt_block
    assert [chunk.epoch for chunk in chunks] == [0] * anew + [1] * (end - anew)
    found = [chunk.frames for chunk in chunks]
    undisturbed = frames_from(alone, 0, end, fox=0, hen=prompt_block)
    assert same(found, undisturbed) == [True] * anew + [False] * (end - anew)
    assert all(same(found[anew:], frames_from(alone, anew, end, fox=anew, hen=prompt_block)))
    assert not any(same(found[anew:], frames_from(alone, anew, end, fox=anew))), "the control: the prompt is kept"
    assert torch.equal(*found[anew]), "its only image is repeated"


def test_a_slow_watcher_holds_it_up(alone: FifoStreamingPipeline) -> None:
    """Credit is for the frames in the queue, and a few more; nothing is queued beyond."""
    with alone.stream("a fox", delivery=StreamDelivery(lead=1)) as session:
        for _ in range(3):
            next(session)
        assert session.in_flight <= QUEUE.levels + alone.plan.depth + 1


def test_only_the_prompt_can_change(alone: FifoStreamingPipeline) -> None:
    with alone.stream("a fox", seconds=1.0) as session:
        with pytest.raises(PlanError, match="no window to clear"):
            session.set_prompt("a hen", transition="cut")
        with pytest.raises(PlanError, match="takes no reference"):
            session.set_reference(torch.zeros(8, 12, 3, dtype=torch.uint8))
        with pytest.raises(PlanError, match="only the prompt"):
            session.set_param("audio_scale", 2.0)
        with pytest.raises(PlanError, match="takes no audio"):
            session.push_audio(torch.zeros(8), 2000)


def test_what_cannot_be(alone: FifoStreamingPipeline, face_folder: Path, tmp_path: Path) -> None:
    make = FifoStreamingPipeline.from_pretrained
    with pytest.raises(PlanError, match=r"no model_index\.json"):
        make(tmp_path, config=CONFIG)
    with pytest.raises(PlanError, match="does not fit a queue of 4 zones on 1 devices"):
        make(face_folder, devices="cpu", plan=StreamPlan.even(4, 2), config=CONFIG)
    with pytest.raises(PlanError, match=r"a plan of 3 zones .* does not fit a queue of 4 zones"):
        make(face_folder, devices="cpu", plan=StreamPlan.even(3, 1), config=CONFIG)
    with pytest.raises(PlanError, match="2 for each, does not fit a queue of 4 zones on 8 devices"):
        make(face_folder, devices="cpu:8", plan=StreamPlan.even(4, 8, decode="last"), config=CONFIG)
    for fps in (0, 1e-5, float("inf")):  # of which no video could be written
        with pytest.raises(PlanError, match=f"fps={fps}: it must be a number from 0.001 to 1000"):
            FifoConfig(fps=fps)
    with pytest.raises(PlanError, match="seconds=0"):
        alone.stream("a fox", seconds=0)
    with pytest.raises(PlanError, match="seed=-1"):
        alone.stream("a fox", seed=-1)
    with pytest.raises(PlanError, match="cannot be recorded"):
        alone.stream("a fox", delivery=StreamDelivery(record=tmp_path / "journal.jsonl"))
    with pytest.raises(PlanError, match="keep_alive=True: this stream takes no audio: leave it out"):
        alone.stream("a fox", delivery=StreamDelivery(keep_alive=True))
    for scale in (float("nan"), "5", True):  # which is no guidance, silently, to a comparison with 1
        with pytest.raises(PlanError, match=f"guidance_scale={scale!r}: it must be a number from 0 to 1000"):
            alone.stream("a fox", guidance_scale=scale)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="negative_prompt=None: it must be a text"):
        alone.stream("a fox", negative_prompt=None)  # type: ignore[arg-type]
    folder = tmp_path / "two"
    shutil.copytree(face_folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="a window of the queue contains both"):
        make(folder, devices="cpu", config=CONFIG)
