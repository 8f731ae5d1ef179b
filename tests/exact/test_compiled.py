"""Compiled blocks of denoisers in bands: equal to the plain denoiser; the exchange is one operator of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.compiled import is_compiled, unify_processors
from patchpar.strategies import parse_strategy
from tests.breadth import first_of
from tests.exact import denoisers
from tests.exact.on_ranks import first
from tests.tensors import relative
from tests.unit.threads import on_threads

LIMIT = 1e-5
STALE = ("displaced:warmup_steps=1", "pcpp:warmup_steps=1", "fresh-edges", "fresh-edges:context=pooled")


def predicted(
    models: list[Any], strategy: str = "exact", exchange: str = "on", name: str = "sdxl", steps: int = 2
) -> list[Any]:
    """The prediction of the last of some steps on two ranks, or the error."""
    torch.compile(torch.sin, backend="eager")(torch.ones(1))  # its list of torch's functions is made: ranks are threads
    arguments = denoisers.call(name, 16, 16)

    def on_rank(transport: Any) -> Any:
        model, clock = models[transport.rank], StepClock()
        axis = Axis("patch", transport.rank, 2, (0, 1))
        split: Any = parse_strategy(strategy).install(model, Communicator(transport), axis, clock=clock)
        split.exchange = exchange
        split.reset()
        with torch.no_grad():
            for _ in range(steps):
                clock.next_call()
                found = first(split.denoise(model.forward, **arguments))
                clock.tick()
        split.finish()
        split.restore()
        return found

    return on_threads(2, on_rank, deadline=100.0)


@pytest.mark.parametrize("strategy", first_of(["exact", *STALE], "exact"))
def test_repeated_blocks(strategy: str) -> None:
    """`fullgraph=True` raises if the exchange is seen."""
    torch._dynamo.reset()
    counter = CompileCounter()
    models: list[Any] = [denoisers.build("sdxl") for _ in range(2)]
    with torch.no_grad():
        want = first(models[0](**denoisers.call("sdxl", 16, 16)))
        eager = predicted(models, strategy)
    for model in models:
        unify_processors(model)  # as a pipeline does, for torch before 2.8
        model.compile_repeated_blocks(backend=counter, fullgraph=True)
    compiled = predicted(models, strategy)
    for one, other in zip(compiled, eager, strict=True):
        assert relative(one, other) <= LIMIT
    if strategy == "exact":
        assert max(relative(one, want) for one in compiled) <= LIMIT
        assert min(relative(one, want) for one in predicted(models, exchange="off")) > 100 * LIMIT
    graphs = counter.frame_count
    assert graphs > 0
    predicted(models, strategy)
    assert counter.frame_count == graphs
    assert any(is_compiled(module) for module in models[0].modules())
    assert not [path for path, module in models[0].named_modules() if hasattr(module, "_diffusers_hook")]


@pytest.mark.parametrize(
    ("compile_it", "words"),
    [
        (lambda model: model.mid_block.compile(backend="eager"), "mid_block.*norm.* is in a compiled block and reads"),
        (lambda model: _wrap(model), "UNet2DConditionModel has blocks that torch.compile.block. has wrapped"),
    ],
)
def test_what_cannot_be_compiled(compile_it: Any, words: str) -> None:
    models: list[Any] = [denoisers.build("sdxl") for _ in range(2)]
    for model in models:
        compile_it(model)
    for found in predicted(models):
        with pytest.raises(UnsupportedModel, match=words):
            raise found


def _wrap(model: nn.Module) -> None:
    model.mid_block = torch.compile(model.get_submodule("mid_block"), backend="eager")  # type: ignore[assignment]
