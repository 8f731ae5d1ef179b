"""From a folder of Live Avatar as it is published, a face and a voice to a video: by Python and by command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.errors import PlanError
from patchpar.models.streaming.config import StreamConfig
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import StreamDelivery
from patchpar.stream.recording import StreamRecording
from patchpar.stream.video_source import frames_from
from patchpar.stream.worker_group import ENGINE, ModelLoading, WorkerGroup
from tests.cli.test_real import assert_libraries_are_silent
from tests.media.test_audio_file import write_wav
from tests.stream.on_pool import PoolExecutor
from tests.stream.tiny_speech import COLUMNS, ROWS, lora, published, samples, write_base, write_checkpoint
from tests.tensors import noise

FACE = (noise(4 * ROWS, 4 * COLUMNS, 3, seed=8) * 60 + 128).clamp(0, 255).to(torch.uint8)
VOICE = samples(1.2)
"""30 images: blocks of 9, 12 and 9, which is filled up with silence."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted by the command, then of tiny images and two steps."""
    at = tmp_path_factory.mktemp("live-avatar")
    weights = published(write_base(at / "base"))
    save_file(lora(weights), at / "liveavatar.safetensors")
    checkpoint = write_checkpoint(at / "Wan2.2-S2V-14B", weights)
    words = ["convert", checkpoint, "--to", at / "model", "--base", at / "base"]
    result = CliRunner().invoke(app, [*map(str, words), "--lora", str(at / "liveavatar.safetensors")])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("live-avatar: 0.1 million weights")
    assert "into 3 layers" in result.stdout
    assert "patchpar stream PROMPT --audio a.wav --reference face.png --model" in result.stdout
    file = at / "model" / "stream.json"
    facts = json.loads(file.read_text())
    facts |= {"height": 4 * ROWS, "width": 4 * COLUMNS, "sigmas": [1.0, 0.6, 0.0], "text_tokens": 5}
    file.write_text(json.dumps(facts))
    return at / "model"


def on_pool(folder: Path, ranks: Any, number: int, plan: StreamPlan | None = None) -> StreamingPipeline:
    config, plan = StreamConfig.load(folder), plan or StreamPlan.even(2, number)
    executor: Any = PoolExecutor(ranks, f"speech-{number}", ENGINE)
    facts = executor.call("load", str(folder), config, plan, {})[0]
    loading = ModelLoading(folder=str(folder), config=config, options={}, devices=("cpu",) * number, deadline=60)
    return StreamingPipeline(WorkerGroup(executor, plan, loading), config, facts)


def test_frames_of_one_process_on_ranks(folder: Path, ranks: Any, tmp_path: Path) -> None:
    """Live sound in pieces on three ranks, a file's sound on two, and a recording again on one: the same bits."""
    three, two = on_pool(folder, ranks, 3), on_pool(folder, ranks, 2)
    with three.stream("a face", reference=FACE, audio="live", seed=3) as session:
        for piece in VOICE.split(5000):
            session.push_audio(piece, 16000)
        session.end_audio()
        chunks = list(session)
    assert [len(chunk.frames) for chunk in chunks] == [9, 12, 12]
    assert all(chunk.audio is not None for chunk in chunks)
    record = StreamDelivery(record=str(tmp_path / "a.jsonl"))
    with two.stream("a face", reference=FACE, audio=(VOICE, 16000), seed=3, delivery=record) as session:
        again = list(session)
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(chunks, again, strict=True))
    recording = StreamRecording.read(tmp_path / "a.jsonl")
    with StreamingPipeline.from_pretrained(folder, devices="cpu") as one:
        assert one.rate == 16000
        with one.replay(recording) as session:
            assert [recording.is_as_it_was(chunk) for chunk in session] == [True] * 3
        other = VOICE.clone()
        other[16000:] = 0
        with one.stream("a face", reference=FACE, audio=(other, 16000), seed=3) as session:
            found = list(session)
        assert [torch.equal(a.frames, b.frames) for a, b in zip(chunks, found, strict=True)] == [True, True, False]
        with pytest.raises(PlanError, match="this model starts from an image: pass reference="):
            one.stream("a face", audio=(VOICE, 16000))


def test_a_pose_video_on_ranks(folder: Path, ranks: Any, tmp_path: Path) -> None:
    """On two ranks the frames of one; poses matter from their block on, and black follows their end."""
    two, poses = on_pool(folder, ranks, 2), write_poses(tmp_path / "poses.mp4", 33)
    given: dict[str, Any] = {"reference": FACE, "audio": (VOICE, 16000), "seed": 3}
    with two.stream("a face", pose=poses, **given) as session:
        chunks = list(session)
    assert [len(chunk.frames) for chunk in chunks] == [9, 12, 12]
    images = list(frames_from(poses, 25, 4 * ROWS, 4 * COLUMNS))
    black = [torch.zeros_like(images[0])] * 12
    with StreamingPipeline.from_pretrained(folder, devices="cpu") as one:

        def equal(pose: Any) -> list[bool]:
            with one.stream("a face", pose=pose, **given) as session:
                return [torch.equal(a.frames, b.frames) for a, b in zip(chunks, session, strict=True)]

        assert equal(io.BytesIO(poses.read_bytes())) == [True] * 3
        assert equal(images[:21] + black) == [True, True, False]
        assert equal(None)[0] is False
        with one.stream("a face", pose=images[:21], **given) as session:
            ended = [chunk.frames for chunk in session]
        with one.stream("a face", pose=images[:21] + black, **given) as session:
            assert all(torch.equal(a, b.frames) for a, b in zip(ended, session, strict=True))
        for pose, message in (
            ("no.mp4", "pose='no.mp4': there is no such file"),
            ([], "pose=: it has no frames"),
            (3, "pose=3: give a file, or images"),
        ):
            with pytest.raises(PlanError, match=message):
                one.stream("a face", pose=pose, **given)
        with pytest.raises(PlanError, match="holds no frames of a video"):
            one.stream("a face", pose=poses, **given, delivery=StreamDelivery(record="a.jsonl"))


def test_two_speakers_on_ranks(folder: Path, ranks: Any) -> None:
    """On three ranks the frames of one; with one mask that is white everywhere, those of a single speaker."""
    three, silence = on_pool(folder, ranks, 3), torch.zeros(len(VOICE))
    left = torch.zeros_like(FACE)
    left[:, : 2 * COLUMNS] = 255
    short = samples(1.0, seed=6)
    pair: dict[str, Any] = {"audio": [(VOICE, 16000), (short, 16000)], "masks": [left, 255 - left]}
    with three.stream("two faces", reference=FACE, seed=3, **pair) as session:
        chunks = list(session)
    heard = torch.cat([chunk.audio for chunk in chunks])
    both = VOICE + torch.cat([short, silence[16000:]])
    assert torch.equal(heard[: len(VOICE)], both.clamp(-1, 1))
    with StreamingPipeline.from_pretrained(folder, devices="cpu") as one:

        def frames(**given: Any) -> list[torch.Tensor]:
            with one.stream("two faces", reference=FACE, seed=3, **given) as session:
                return [chunk.frames for chunk in session]

        assert all(torch.equal(a.frames, b) for a, b in zip(chunks, frames(**pair), strict=True))
        single = frames(audio=(VOICE, 16000))
        white = torch.full_like(FACE, 255)
        alone = frames(audio=[(VOICE, 16000), (short, 16000)], masks=[white, torch.zeros_like(FACE)])
        assert max(int((a.int() - b.int()).abs().max()) for a, b in zip(alone, single, strict=True)) <= 1
        swapped = frames(audio=pair["audio"], masks=pair["masks"][::-1])
        assert not torch.equal(swapped[1], chunks[1].frames), "the control: who is where matters"
        for audio, masks, message in (
            ([(VOICE, 16000)] * 2, [left], "2 voices in audio= and 1 masks="),
            ((VOICE, 16000), [left], "1 voices in audio= and 1 masks=: give lists"),
            ([(VOICE, 16000)] * 2, None, "2 voices in audio= and 0 masks="),
            (["live", "live"], [left, left], "audio='live' is one voice"),
            ([(VOICE, 16000)] * 2, [left, left[:4]], "does not fit"),
        ):
            with pytest.raises(PlanError, match=message):
                one.stream("two faces", reference=FACE, audio=audio, masks=masks)
        with pytest.raises(PlanError, match="nor several voices"):
            one.stream("two faces", reference=FACE, **pair, delivery=StreamDelivery(record="a.jsonl"))


@pytest.mark.breadth
def test_speakers_and_poses_on_ranks_that_share_a_step(folder: Path, ranks: Any, tmp_path: Path) -> None:
    """Frames of one process but for rounding, with another reference in mid-stream. Daily at the model: test_inner."""
    four = on_pool(folder, ranks, 4, StreamPlan(sizes=(1, 1), inner=2, decode="last"))
    left = torch.zeros_like(FACE)
    left[:, : 2 * COLUMNS - 4] = 255
    voices = [(VOICE, 16000), (samples(1.0, seed=6), 16000)]
    given: dict[str, Any] = {"reference": FACE, "audio": voices, "pose": write_poses(tmp_path / "a.mp4", 33), "seed": 3}

    def frames(pipe: StreamingPipeline, *masks: torch.Tensor) -> torch.Tensor:
        with pipe.stream("two faces", masks=masks, **given) as session:
            session.set_reference(255 - FACE, at=1)
            return torch.cat([chunk.frames for chunk in session]).int()

    found = frames(four, left, 255 - left)
    with StreamingPipeline.from_pretrained(folder, devices="cpu") as one:
        assert int((found - frames(one, left, 255 - left)).abs().max()) <= 1
        assert int((found - frames(one, 255 - left, left)).abs().max()) > 1, "the control: who is where matters"


def write_poses(path: Path, count: int) -> Path:
    """A bar that moves."""
    with av.open(str(path), "w") as container:
        track = container.add_stream("mpeg4", rate=25)
        track.width, track.height = 6 * COLUMNS, 6 * ROWS
        for number in range(count):
            image = np.zeros((6 * ROWS, 6 * COLUMNS, 3), dtype=np.uint8)
            image[:, number : number + 12] = 255
            container.mux(track.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(track.encode())
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pose", "no.mp4"), "--pose no.mp4: there is no such file"),
        (("--pose", "pose.mp4", "--model", "embedded-face"), "embedded-face takes neither"),
        (("--pose", "pose.mp4", "--record", "a.jsonl"), "--record holds neither --pose nor --speaker"),
        (("--pose", "voice.wav"), "has no video track"),
        (("--speaker", "voice.wav"), "--speaker voice.wav: it has to be AUDIO:MASK, and there is no file ''"),
        (("--speaker", "voice.wav:face.png", "--audio", "voice.wav"), "--audio is of one speaker"),
    ],
)
def test_poses_that_cannot_be_used(
    words: tuple[str, ...], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_poses(tmp_path / "pose.mp4", 2)
    write_wav(tmp_path / "voice.wav", VOICE.numpy(), 16000)
    Image.fromarray(FACE.numpy()).save(tmp_path / "face.png")
    model = () if "--model" in words else ("--model", str(folder))
    rest = ("--reference", "face.png", "--devices", "cpu", "-o", "x.mp4", "--seconds", "1")
    result = CliRunner().invoke(app, ["stream", *words, *model, *rest])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cpu:3", marks=pytest.mark.breadth)])
def test_the_command(devices: str, folder: Path, tmp_path: Path) -> None:
    voice = write_wav(tmp_path / "a.wav", VOICE.numpy(), 16000)
    Image.fromarray(FACE.numpy()).save(tmp_path / "face.png")
    words = ("--model", folder, "--audio", voice, "--reference", tmp_path / "face.png", "--devices", devices)
    words += ("--pose", write_poses(tmp_path / "poses.mp4", 30))
    result = CliRunner().invoke(app, ["stream", *map(str, words), "-o", str(tmp_path / "talk.mp4")])
    assert result.exit_code == 0, result.output
    assert_libraries_are_silent(result.stderr)
    assert "lm_head" not in result.stderr
    with av.open(str(tmp_path / "talk.mp4")) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape == (33, 4 * ROWS, 4 * COLUMNS, 3)
