"""Paths that cannot be: too long, or of a user who is none. Whoever takes a path refuses it in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.models.adapters import folder_and_name
from patchpar.models.files import resolve_model
from patchpar.models.streaming.convert import convert_checkpoint
from patchpar.models.streaming.lora import LoraFile
from patchpar.pipeline.planner.simulate import simulate
from patchpar.pipeline.startup import check_request
from patchpar.pipeline.state_changes import with_whole_paths
from patchpar.stream.video_source import frames_from

GIVEN = {"deadline": 10.0, "start_timeout": 10.0, "start_method": None, "verify": True, "vae": "auto"}


def options(**given: Any) -> Any:
    """The checked arguments of a pipeline."""
    return check_request("cpu", "auto", **{**GIVEN, **given})


IMPOSSIBLE = ("~nobody-of-this-name/weights.safetensors", f"{'long/' * 2000}weights.safetensors")
TAKES: dict[str, Callable[[str], Any]] = {
    "simulate": lambda path: simulate(path, "2xH100", "patch=2"),
    "lora": LoraFile.of,
    "lora with a scale": lambda path: LoraFile.of(f"{path}:0.5"),
    "convert": lambda path: convert_checkpoint(path, Path("never-written")),
    "convert to": lambda path: convert_checkpoint("weights.safetensors", path),
    "folder of verifications": lambda path: options(verify=path),
    "file of a secret": lambda path: options(secret_file=path),
    "a file of adapters": lambda path: folder_and_name(path),
    "an argument": lambda path: with_whole_paths("load_lora_weights", [path], {}),
    "a path among the arguments": lambda path: with_whole_paths("set_anything", [], {"file": Path(path)}),
    "cache of the hub": lambda path: resolve_model("org/model", {"cache_dir": path}),
    "video": lambda path: next(frames_from(path, 8.0, 16, 16)),
}


@pytest.mark.parametrize("path", IMPOSSIBLE, ids=["user", "long"])
@pytest.mark.parametrize("takes", TAKES.values(), ids=TAKES)
def test_refused_in_words(takes: Callable[[str], Any], path: str) -> None:
    with pytest.raises(PlanError, match="is no valid path: "):
        takes(path)
