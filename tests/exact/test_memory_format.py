"""A UNet in channels_last stays so in bands: no layer gets a map of another format than in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.unet import layers
from patchpar.strategies import parse_strategy
from tests.breadth import first_of
from tests.exact import denoisers
from tests.exact.on_ranks import first
from tests.tensors import relative
from tests.unit.threads import on_threads

STRATEGIES = ("exact", "displaced:warmup_steps=1", "pcpp:warmup_steps=1", "fresh-edges", "fresh-edges:context=pooled")
LAYERS = (nn.Conv2d, nn.GroupNorm)


def in_rows(found: Any) -> Any:
    """Maps, or the first of what a kernel returns, channel by channel."""
    return (found[0].contiguous(), *found[1:]) if isinstance(found, tuple) else found.contiguous()


def built() -> nn.Module:
    model: nn.Module = denoisers.build("sdxl")
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def note_formats(model: nn.Module, seen: dict[str, list[bool]]) -> None:
    """Note by layer whether the maps that it gets and returns are channels_last; not those of one pixel or channel."""

    def noted(path: str, maps: list[Any]) -> None:
        found = [x for x in maps if isinstance(x, Tensor) and x.ndim == 4 and min(x.shape[1:]) > 1]
        seen[path] = [x.is_contiguous(memory_format=torch.channels_last) for x in found]

    for path, layer in model.named_modules():
        if isinstance(layer, LAYERS):
            layer.register_forward_hook(lambda _, args, output, path=path: noted(path, [*args, output]))


def split_formats(strategy: str) -> list[tuple[dict[str, list[bool]], Tensor]]:
    """Of the last of three steps on two ranks, and the prediction."""
    models = [built() for _ in range(2)]
    arguments = denoisers.call("sdxl", 16, 16)

    def on_rank(transport: Any) -> tuple[dict[str, list[bool]], Tensor]:
        model, clock = models[transport.rank], StepClock()
        axis = Axis("patch", transport.rank, 2, (0, 1))
        split: Any = parse_strategy(strategy).install(model, Communicator(transport), axis, clock=clock)
        split.reset()
        seen: dict[str, list[bool]] = {}
        with torch.no_grad():
            for step in range(3):
                if step == 1:  # the first one finds the exchange points
                    note_formats(model, seen)
                clock.next_call()
                found = first(split.denoise(model.forward, **arguments))
                clock.tick()
        split.finish()
        split.restore()
        return seen, found

    return on_threads(2, on_rank, deadline=100.0)


def undone(strategy: str) -> list[str]:
    """Layers of which a map is in another format than in one piece, on any rank."""
    model, want = built(), dict[str, list[bool]]()
    note_formats(model, want)
    with torch.no_grad():
        whole = first(model(**denoisers.call("sdxl", 16, 16)))
    assert sum(map(all, want.values())) > 20
    found = list[str]()
    for seen, prediction in split_formats(strategy):
        assert seen.keys() == want.keys()
        assert relative(prediction, whole) < (1e-5 if strategy == "exact" else 1.0)
        found += [path for path in want if all(want[path]) and not all(seen[path])]
    return found


@pytest.mark.parametrize("strategy", first_of(STRATEGIES, "fresh-edges"))
def test_maps_stay_channels_last(strategy: str) -> None:
    assert not undone(strategy)


def test_a_norm_that_undoes_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = layers.normalise_groups
    monkeypatch.setattr(layers, "normalise_groups", lambda *args, **options: in_rows(norm(*args, **options)))
    assert undone("exact")
