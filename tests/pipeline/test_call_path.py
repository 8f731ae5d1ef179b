"""The way of a prompt from the call to a denoiser is short: few files to read for whoever looks for something."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import patchpar
from patchpar import ParallelPipeline
from patchpar.launch.channel import Channel, FrameKind
from tests.breadth import first_of
from tests.pipeline.conftest import QUICK, Hold
from tests.pipeline.odd import NotesItsCallers
from tests.tiny import build

CALL = {**QUICK, "num_inference_steps": 1, "output_type": "latent"}
PACKAGE = Path(patchpar.__file__).parent
MOST_FILES = 15


def ours(files: Iterable[str]) -> set[str]:
    """The files of the package among them."""
    paths = map(Path, files)
    return {str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)}


def noting(path: Path) -> Any:
    """A pipeline whose denoiser writes to `path` what it is called by."""
    pipe = build("sdxl").pipe
    pipe.unet.time_proj = NotesItsCallers(pipe.unet.time_proj, path)
    return pipe


def test_in_this_process(tmp_path: Path) -> None:
    with ParallelPipeline(noting(tmp_path / "stack"), devices="cpu") as pipe:
        pipe(**CALL)
    files = ours((tmp_path / "stack").read_text().splitlines())
    assert {"pipeline/pipeline.py", "pipeline/runner.py"} <= files
    assert len(files) <= 6, sorted(files)


@pytest.mark.parametrize("plan", first_of(["patch=2", "cfg=2"], "patch=2"))
def test_through_workers(hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    """From the call to the socket here, from the socket to the denoiser there."""
    sent: set[str] = set()
    send = Channel.send

    def noted(channel: Channel, frame: Any) -> None:
        if frame.kind is FrameKind.CALL:
            sent.update(ours(frame.filename for frame in traceback.extract_stack()), {"launch/channel.py"})
        send(channel, frame)

    with hold(noting(tmp_path / "stack")) as pipe:
        pipe.plan = plan
        monkeypatch.setattr(Channel, "send", noted)
        pipe(**CALL)
        monkeypatch.undo()
    received = ours((tmp_path / "stack").read_text().splitlines())
    assert "pipeline/pipeline.py" in sent
    assert {"launch/worker.py", "pipeline/denoiser_hook.py"} <= received
    assert len(sent | received) <= MOST_FILES, sorted(sent | received)
