"""`patchpar fifo`: a prompt and a model of short clips in, a video of any length out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from patchpar import FifoConfig, FifoOptions, FifoStreamingPipeline
from patchpar.cli import app
from patchpar.cli.video_file import StreamVideoFile
from tests.cli.test_stream import decoded
from tests.stream.tiny import COLUMNS, ROWS, TEXT, write_folder
from tests.tiny import video_transformer_pipelines

QUEUE = ("--window", 4, "--partitions", 2, "--first-steps", 2)
SIZE = ("--height", 2 * ROWS, "--width", 2 * COLUMNS, "--fps", 20, "--text-tokens", TEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_stream_json(write_folder(tmp_path_factory.mktemp("face"), hears=False))


def without_stream_json(folder: Path) -> Path:
    (folder / "stream.json").unlink()
    return folder


def test_a_block_causal_model_is_none_for_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["fifo", "a fox", "--model", "embedded-face", "-o", str(tmp_path / "a.mp4")])
    assert result.exit_code == 2
    assert "--model generates video block by block, of any length: use `patchpar stream`" in result.stderr


def wanted(folder: Path, prompt: str, **arguments: Any) -> Tensor:
    queue = FifoOptions(window=4, partitions=2, first_steps=2)
    config = FifoConfig(fps=20, height=2 * ROWS, width=2 * COLUMNS, queue=queue, text_tokens=TEXT)
    with (
        FifoStreamingPipeline.from_pretrained(folder, devices="cpu", config=config) as pipe,
        pipe.stream(prompt, **arguments) as session,
    ):
        return torch.cat([chunk.frames for chunk in session])


def test_the_file_has_the_frames_of_the_pipeline(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, show = list[Tensor](), StreamVideoFile.show

    def noted(self: StreamVideoFile, frames: Tensor, pts: float, audio: Tensor | None) -> None:
        saved.append(frames)
        show(self, frames, pts, audio)

    monkeypatch.setattr(StreamVideoFile, "show", noted)
    words = ("a fox", "--model", folder, *SIZE, *QUEUE, "--seconds", 0.4, "--guidance-scale", 3, "--seed", 5)
    result = run("fifo", *words, "--devices", "cpu", "--json", "-o", tmp_path / "fox.mkv")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    pixels, times, _ = decoded(tmp_path / "fox.mkv")
    assert found["frames"] == len(pixels) == 9  # one image of the first latent frame, two of each further one
    assert (found["seconds"], found["outputs"]) == (pytest.approx(0.45), [str(tmp_path / "fox.mkv")])
    assert "8 frames in 4 zones" in found["plan"]
    assert times == pytest.approx([number / 20 for number in range(9)], abs=1e-3)
    same, other = (wanted(folder, "a fox", seconds=0.4, guidance_scale=scale, seed=5) for scale in (3.0, 1.0))
    assert torch.equal(torch.cat(saved), same)
    assert not torch.equal(torch.cat(saved), other), "the control: without guidance it is another video"


def test_what_cannot_be_is_refused_before_anything_starts(run: Any, folder: Path, tmp_path: Path) -> None:
    for words, text in (
        (("--seconds", 0), "--seconds 0.0: it must be above 0"),
        (("--restarts", -1), "--restarts -1: it must be at least 0"),
        (("--window", 5), "even number of latent frames"),
        (("-o", tmp_path / "fox.gif"), "names no video format"),
        (("--model", tmp_path), "no model_index.json"),
        (("--model", "embedded"), "embedded is a StableDiffusionXLPipeline: a queue of frames is denoised by"),
    ):
        given = dict(zip(("--model", "-o"), (folder, tmp_path / "a.mp4"), strict=True)) | {words[0]: words[1]}
        result = run("fifo", "a fox", *(word for pair in given.items() for word in pair))
        assert result.exit_code == 2, result.stdout
        assert text in result.stderr


@pytest.mark.breadth
def test_ltx_video_on_three_workers(run: Any, tmp_path: Path) -> None:
    made, _ = video_transformer_pipelines.ltx()
    made.save_pretrained(tmp_path / "ltx")
    size = ("--height", 24, "--width", 24, "--fps", 16, "--text-tokens", 32, "--seconds", 1)
    words = ("a fox", "--model", tmp_path / "ltx", *size, *QUEUE)
    result = run("fifo", *words, "--devices", "cpu:3", "-o", tmp_path / "fox.mp4")
    assert result.exit_code == 0, result.stderr
    assert len(decoded(tmp_path / "fox.mp4")[0]) == 17  # one image, and eight of each further latent frame
