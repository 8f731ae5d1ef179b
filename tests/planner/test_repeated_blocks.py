"""A call with blocks that were noted again, rather than run, is the recorded one to the operator and the byte."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from patchpar.models.dry_run.meta_mode import MetaMode
from patchpar.pipeline.planner.block_events import renamed
from patchpar.pipeline.planner.call_log import CallLog, LoggedBytes, LoggedTape
from patchpar.pipeline.planner.derived_ranks import LoggedRanks
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.repeated_blocks import RepeatedBlocks
from patchpar.plan.plan import Plan
from patchpar.shard.hooks import HookSet
from tests import tiny
from tests.breadth import first_of
from tests.planner.on_ranks import call_of, noted_again

MORE = 5
PLANS = ["single", "patch=3", "patch=4,strategy=exact:ulysses=2", "cfg=2,patch=2"]
MODELS = ("flux", "sd3", "sdxl", "pixart", "wan", "sd", "qwen", "auraflow", "cogvideox", "ltx", "dit", "hunyuan_video")
REPEATED = {"flux", "sd3", "pixart", "wan", "qwen", "cogvideox", "ltx", "dit", "hunyuan_video"}


def longer(name: str) -> Any:
    """A tiny pipeline with more copies of the first block in each list of its transformer; a UNet is as it is."""
    pipe = tiny.build(name).pipe
    lists = pipe.transformer.children() if "transformer" in pipe.components else ()
    for blocks in lists:
        if type(blocks) is nn.ModuleList and len(blocks):
            for _ in range(MORE):
                blocks.insert(1, deepcopy(blocks[0]))
    return pipe


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of blocks that were not run."""
    return noted_again(monkeypatch, RepeatedBlocks)


@pytest.mark.parametrize("joined", [True, False], ids=["gpus", "cpu"])
@pytest.mark.parametrize("name", first_of(MODELS, "flux"))
def test_blocks_that_are_noted_again_are_those_that_run(again: list[str], name: str, *, joined: bool) -> None:
    pipe, kwargs = longer(name), call_of(name, 1)
    options = RecordOptions(steps=1, joined=joined)
    for text in PLANS:
        plan = Plan.parse(text)
        if plan.cfg > 1 and name in ("flux", "dit", "qwen", "hunyuan_video"):
            continue  # without guidance branches
        Recording(pipe, plan, kwargs, options).of_rank(0)  # what a first call finds, is known
        for rank in (0, plan.world_size - 1):
            expected = Recording(pipe, plan, kwargs, options).of_rank(rank)
            assert Recording(pipe, plan, kwargs, options, LoggedRanks()).of_rank(rank) == expected, f"{plan}, {rank}"
    assert bool(again) == (name in REPEATED)


def test_stale_values_and_divided_weights_are_recorded_block_by_block(again: list[str]) -> None:
    pipe = longer("flux")
    for plan in ("patch=2,strategy=displaced:warmup_steps=1", "patch=2,weights=sharded", "stage=2"):
        Recording(pipe, Plan.parse(plan), call_of("flux", 2), RecordOptions(steps=2), LoggedRanks()).of_rank(0)
    assert not again


class Blocks(nn.Module):
    """Six equal blocks, of which what `change` does to them in turn makes others."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        for number, layer in enumerate(self.layers):
            if change is not None:
                change(number, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """A product, a function of it and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.act = nn.Linear(8, 8), 1.0, F.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.factor


def recorded(network: nn.Module, *, repeated: bool) -> tuple[Any, ...]:
    """The events of a call, the tape, and the bytes."""
    network.to("meta")
    log = CallLog()
    tape, memory = LoggedTape(log, joined=True), LoggedBytes(log, "denoise")
    with HookSet() as hooks, torch.no_grad(), MetaMode(memory, tape.operator):
        memory.begin("denoise")
        if repeated:
            RepeatedBlocks(log, tape, memory, {}).install(hooks, {"network": network})
        out = network(torch.empty(4, 8, device="meta"))
        found = tape.tape, dict(memory.peaks), dict(memory.working), memory.alive, out.shape, out.stride()
        del out
        assert memory.alive == len(memory.storages) == 0
    return found


def wider(number: int, layer: Any) -> None:
    if number == 3:
        layer.linear = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))


def other_factor(number: int, layer: Any) -> None:
    layer.factor = float(number)


def other_function(number: int, layer: Any) -> None:
    layer.act = F.gelu if number == 3 else F.silu


def counting(number: int, layer: Any) -> None:
    """It has another attribute after each call."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        layer.calls = getattr(layer, "calls", 0) + 1000
        return x + 1

    layer.forward = forward


def in_place(number: int, layer: Any) -> None:
    layer.forward = lambda x: x.mul_(2)


@pytest.mark.parametrize(
    ("change", "run"),
    [(None, 2), (wider, 3), (other_function, 3), (other_factor, 6), (counting, 6), (in_place, 6)],
    ids=["equal", "wider", "function", "factor", "counting", "in place"],
)
def test_only_blocks_that_do_the_same_are_left_out(again: list[str], change: Any, run: int) -> None:
    plain, found = (recorded(Blocks(change), repeated=repeated) for repeated in (False, True))
    assert found == plain
    assert len(again) == 6 - run


class Cached(Layer):
    """A layer that counts its calls in a list, and keeps its input there in the place of the last one."""

    def forward(self, x: torch.Tensor, kept: list[Any] | None = None) -> torch.Tensor:
        assert kept is not None
        kept[0], kept[1] = kept[0] + 1, x.clone()
        return super().forward(x)


class WithCaches(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cached() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[Any] = [0, x.clone()]
        for layer in self.layers:
            x = layer(x, kept)
        assert kept[0] == len(self.layers)
        return x


def test_blocks_that_change_their_arguments_are_run(again: list[str]) -> None:
    """What they free is freed when they free it."""
    plain, found = (recorded(WithCaches(), repeated=repeated) for repeated in (False, True))
    assert found == plain
    assert not again


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("blocks.1 attention 0", "blocks.7 attention 0"),
        ("transformer.blocks.1.attn.to_q", "transformer.blocks.7.attn.to_q"),
        ("blocks.1", "blocks.7"),
        ("blocks.10 attention 0", "blocks.10 attention 0"),
        ("single_blocks.1 attention 0", "single_blocks.1 attention 0"),
        ("kv", "kv"),
    ],
)
def test_exchange_points_of_a_block_have_its_path(text: str, expected: str) -> None:
    assert renamed(text, "blocks.1", "blocks.7") == expected
