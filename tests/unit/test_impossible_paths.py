"""Paths that cannot be: too long, or of a user who is none. Whoever takes a path refuses it in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.pipeline.planner.simulate import simulate
from patchpar.stream.causal.lora import LoraFile
from patchpar.stream.convert import convert_checkpoint
from patchpar.stream.video_source import frames_from

IMPOSSIBLE = ("~nobody-of-this-name/weights.safetensors", f"{'long/' * 2000}weights.safetensors")
TAKES: dict[str, Callable[[str], Any]] = {
    "simulate": lambda path: simulate(path, "2xH100", "patch=2"),
    "lora": LoraFile.of,
    "lora with a scale": lambda path: LoraFile.of(f"{path}:0.5"),
    "convert": lambda path: convert_checkpoint(path, Path("never-written")),
    "convert to": lambda path: convert_checkpoint("weights.safetensors", path),
    "video": lambda path: next(frames_from(path, 8.0, 16, 16)),
}


@pytest.mark.parametrize("path", IMPOSSIBLE, ids=["user", "long"])
@pytest.mark.parametrize("takes", TAKES.values(), ids=TAKES)
def test_refused_in_words(takes: Callable[[str], Any], path: str) -> None:
    with pytest.raises(PlanError, match="is no valid path: "):
        takes(path)
