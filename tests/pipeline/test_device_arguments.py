"""Tensors among the arguments of a method come to the device of the rank, which a network does not do itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.launch.inline import InlineContext
from patchpar.pipeline.runner import PipelineRunner


class Network:
    """Returns where its arguments are."""

    def decode(self, latents: Any, *, options: dict[str, Any]) -> list[str]:
        return [latents.device.type, options["scale"].device.type, options["name"]]


@pytest.fixture
def runner() -> PipelineRunner:
    """Of a rank on another device than the caller's tensors."""
    found = PipelineRunner(InlineContext("meta"))
    found.pipe = SimpleNamespace(vae=Network(), components={}, load_weights=lambda weights: weights["a"].device.type)
    return found


def test_tensors_come_to_the_device(runner: PipelineRunner) -> None:
    options = {"scale": torch.ones(1), "name": "as it is"}
    made = runner.apply("vae.decode", (torch.ones(1),), {"options": options})
    assert made.value == ["meta", "meta", "as it is"]
    assert options["scale"].device.type == "cpu", "the caller's own"


def test_weights_stay_where_they_are(runner: PipelineRunner) -> None:
    """A method that loads them brings what it takes of them to the device."""
    assert runner.apply("load_weights", ({"a": torch.ones(1)},), {}).value == "cpu"
