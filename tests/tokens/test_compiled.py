"""Blocks that torch has compiled, with their tokens split: one graph each, and the same result."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention.all_gather import attend_gathered
from patchpar.shard.compiled import is_compiled
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.strategies import parse_strategy
from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.threads import on_threads

from .ranks import LIMIT, error, plain, plan_of, predictions

NAMES = ["Flux", "SD3", "PixArt", "QwenImage"]
LONGER = {
    **{name: f"{name}Transformer2DModel" for name in NAMES},
    "HunyuanVideo": "HunyuanVideoTransformer3DModel",  # refines its text in compiled blocks that are not split
    "Wan": "WanTransformer3DModel",
}


def compiled(name: str, counter: Any) -> nn.Module:
    model: Any = TRANSFORMERS[LONGER[name]].build()
    if model._repeated_blocks:
        model.compile_repeated_blocks(backend=counter, fullgraph=True)
    else:
        for block in model.transformer_blocks:
            block.compile(backend=counter, fullgraph=True)
    return model


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "strategy"),
    first_of(
        [*((name, "exact") for name in LONGER), ("Flux", "exact:attention=ring"), ("SD3", "displaced:warmup_steps=1")],
        ("PixArt", "exact"),
    ),
)
def test_whole_graphs(name: str, strategy: str) -> None:
    """`fullgraph=True` raises if the exchange is seen. The third call compiles nothing new."""
    torch._dynamo.reset()
    counter, full = CompileCounter(), TRANSFORMERS[LONGER[name]]
    models = [compiled(name, counter) for _ in range(2)]
    want = plain(LONGER[name], 0)[0]

    def on_rank(transport: Any) -> list[Any]:
        model, clock = models[transport.rank], StepClock()
        axis = Axis("patch", transport.rank, 2, (0, 1))
        split = parse_strategy(strategy).install(model, Communicator(transport), axis, clock=clock)
        split.reset()
        found, graphs = [], []
        with torch.no_grad():
            for _ in range(3):
                clock.next_call()
                found.append(predictions(split.denoise(model.forward, **full.call(0)))[0])
                graphs.append(counter.frame_count)
                clock.tick()
        split.finish()
        split.restore()
        return [found, graphs]

    results = on_threads(2, on_rank, deadline=100.0)
    assert not [each for each in results if isinstance(each, Exception)]
    for found, graphs in results:
        assert max(relative(x, want) for x in found) <= LIMIT
        assert graphs[-1] > 0
    assert counter.frame_count == max(graphs[-1] for _, graphs in results)
    with torch.no_grad():
        again = predictions(models[0](**full.call(0)))[0]  # compiled as before, without us
    assert relative(again, want) <= LIMIT
    assert any(is_compiled(module) for module in models[0].modules())


@pytest.mark.breadth
def test_a_compiled_part_of_a_block() -> None:
    """The block runs as it is, and in its compiled attention the exchange is one operator too."""
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="eager")(torch.ones(1))  # its list of torch's functions is made: ranks are threads
    counter, name = CompileCounter(), "FluxTransformer2DModel"
    models = [TRANSFORMERS[name].build() for _ in range(2)]
    for model in models:
        for block in model.transformer_blocks:
            block.attn.compile(backend=counter, fullgraph=True)
    plan = plan_of(name)

    def on_rank(transport: Any) -> Any:
        comm, axis = Communicator(transport), Axis("patch", transport.rank, 2, (0, 1))
        shard = TransformerSharder(models[transport.rank], plan, TokenSplit(comm, axis, attend_gathered))
        with torch.no_grad():
            found = predictions(shard.denoise(models[transport.rank].forward, **TRANSFORMERS[name].call(0)))
        shard.restore()
        return found

    assert error(on_threads(2, on_rank, deadline=100.0), plain(name, 0)) <= LIMIT
    assert counter.frame_count > 0


def test_blocks_that_are_wrapped_are_refused() -> None:
    """As those of UNets: nothing in them can be seen, whether they run on whole tensors or on our tokens."""

    def on_rank(transport: Any) -> None:
        model: Any = TRANSFORMERS["FluxTransformer2DModel"].build()
        model.transformer_blocks[0] = torch.compile(model.transformer_blocks[0], backend="eager")
        axis = Axis("patch", transport.rank, 2, (0, 1))
        split = parse_strategy("exact").install(model, Communicator(transport), axis, clock=StepClock())
        with torch.no_grad():
            split.denoise(model.forward, **TRANSFORMERS["FluxTransformer2DModel"].call(0))

    for found in on_threads(2, on_rank, deadline=100.0):
        assert isinstance(found, UnsupportedModel)
        assert "blocks that torch.compile(block) has wrapped: compile them by compile_repeated_blocks()" in str(found)


@pytest.mark.parametrize(("name", "denoiser"), first_of([("flux", "transformer"), ("sdxl", "unet")]))
def test_blocks_compiled_in_the_workers(ranks: Any, name: str, denoiser: str) -> None:
    """As a user does it: `pipe.transformer.compile_repeated_blocks(...)` reaches every rank."""
    got, want, marks = ranks.run("tests.tokens.on_ranks:with_compiled_blocks", POOL_SIZE, name, denoiser)[0]
    assert relative(got, want) <= LIMIT
    assert marks > 0


@pytest.mark.parametrize(
    ("name", "plan", "compiled", "words"),
    [
        ("flux", "patch=2", "transformer.compile", "FluxTransformer2DModel is compiled as a whole.*compile its blocks"),
        ("flux", "cfg=2", "transformer.compile", "FluxTransformer2DModel is compiled as a whole.*compile its blocks"),
    ],
)
def test_what_cannot_be_compiled(ranks: Any, name: str, plan: str, compiled: str, words: str) -> None:
    message = ranks.run("tests.tokens.on_ranks:refusal_of_compiled", POOL_SIZE, name, plan, compiled)[0]
    assert re.search(words, message)
