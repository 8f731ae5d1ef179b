"""What is not there is bad use of the command, said in a sentence: exit code 2, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from patchpar.cli import app
from tests.cli.test_stream import one_block

MODELS = {
    "generate": ("a fox",),
    "compare": ("a fox",),
    "video": ("a fox",),
    "upscale": ("here.png",),
    "stream": ("a fox", "-o", "a.mp4"),
    "app": (),
    "doctor": (),
    "replay": ("here.jsonl",),
}
CONVERT = ("convert", "here.safetensors", "--to", "new")
OTHERS = {
    "video --image": ("video", "--model", "embedded", "--image", "nowhere.png"),
    "upscale": ("upscale", "nowhere.png"),
    "stream --audio": ("stream", "--audio", "nowhere.wav", "-o", "a.mp4"),
    "stream --reference": ("stream", "--reference", "nowhere.png", "-o", "a.mp4"),
    "stream --input": ("stream", "a fox", "--input", "nowhere", "-o", "a.mp4"),
    "replay": ("replay", "nowhere.jsonl"),
    "convert": ("convert", "nowhere.pt", "--to", "new"),
    "convert --base": (*CONVERT, "--family", "self-forcing", "--base", "./nowhere"),
    "tune --devices": ("tune", "--devices", "./nowhere"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("patchpar.launch.local.LocalExecutor.start", lambda *_: pytest.fail("workers were started"))
    Image.new("RGB", (64, 64)).save("here.png")
    one_block(Path("here.jsonl"), "embedded-face")
    save_file({"patch_embedding.bias": torch.zeros(2)}, "here.safetensors")


@pytest.mark.parametrize("model", ["./nowhere", "/no/where"])
@pytest.mark.parametrize("verb", MODELS)
def test_a_model_that_is_not_there(verb: str, model: str) -> None:
    result = CliRunner().invoke(app, [verb, *MODELS[verb], "--model", model])
    assert result.exit_code == 2, result.output
    assert f"'{model}' is no model, and no such folder is here" in result.stderr
    assert "Error: " not in result.stderr


@pytest.mark.parametrize("model", ["./nowhere", "/no/where"])
@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_model_that_is_not_there_to_be_simulated(verb: str, model: str) -> None:
    """Nor is it anything that could be fetched."""
    result = CliRunner().invoke(app, [verb, model, "--machine", "2xH100"])
    assert result.exit_code == 2, result.output
    assert f"'{model}' is no model, and no such folder is here" in result.stderr
    assert "download" not in result.stderr


@pytest.mark.parametrize("words", OTHERS.values(), ids=list(OTHERS))
def test_a_file_that_is_not_there(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 2, result.output
    assert "nowhere" in result.stderr
    assert "Error: " not in result.stderr
