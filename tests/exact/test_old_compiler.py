"""Compiled blocks under torch before 2.8, which compiles a block anew for each attention processor."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from packaging.version import Version
from torch import nn

import patchpar.pipeline.runner
from patchpar.errors import UnsupportedModel
from patchpar.launch.inline import InlineContext
from patchpar.pipeline.runner import PipelineRunner
from patchpar.shard.compiled import unify_processors
from patchpar.shard.unsupported_model import refused_in_words
from tests.exact import denoisers
from tests.exact.on_ranks import first
from tests.tiny import build


def processors(network: Any) -> list[Any]:
    return [layer.processor for layer in network.modules() if hasattr(layer, "processor")]


@pytest.mark.parametrize(("first_for_all", "shared"), [("99", True), ("2.6", False)])
def test_layers_share_a_processor(monkeypatch: pytest.MonkeyPatch, first_for_all: str, shared: bool) -> None:
    monkeypatch.setattr(patchpar.pipeline.runner, "ONE_GRAPH_FOR_ALL", Version(first_for_all))
    pipe, engine = build("sdxl").pipe, PipelineRunner(InlineContext("cpu"))
    engine.adopt(pipe)
    before = len(set(map(id, processors(pipe.unet))))
    engine.apply("unet.compile_repeated_blocks", (), {"backend": "eager"})
    assert (len(set(map(id, processors(pipe.unet)))) == 1) is shared
    assert before > 1


def test_the_prediction_stays() -> None:
    model: Any = denoisers.build("sdxl")
    with torch.no_grad():
        want = first(model(**denoisers.call("sdxl", 16, 16)))
        unify_processors(model)
        assert torch.equal(first(model(**denoisers.call("sdxl", 16, 16))), want)


def test_what_differs_is_not_shared() -> None:
    class Own:
        def __call__(self) -> None: ...

    layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(5)])
    given: list[Any] = [AttnProcessor2_0(), AttnProcessor2_0(), AttnProcessor2_0(), Own(), Own()]
    given[2].backend = "flash"
    for layer, processor in zip(layers, given, strict=True):
        layer.processor = processor
    unify_processors(layers)
    assert [layer.processor for layer in layers] == [given[0], given[0], *given[2:]]


class Sine(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.sin(inputs)


def test_the_limit_is_refused_in_words() -> None:
    """In any torch: two kinds of inputs where one may be compiled."""
    torch._dynamo.reset()
    block = Sine()
    block.compile(backend="eager", fullgraph=True, dynamic=False)

    def call(rows: int) -> None:
        plain = partial(block, torch.ones(rows, 2))
        with refused_in_words(block, "patch=2", "Use plan cfg=2", plain):
            plain()

    with torch._dynamo.config.patch(cache_size_limit=1):
        call(2)
        with pytest.raises(UnsupportedModel) as refusal:
            call(3)
    assert torch.__version__ in str(refusal.value)
    assert "compiled a block of Sine 1 times, its limit" in str(refusal.value)
    torch._dynamo.reset()
