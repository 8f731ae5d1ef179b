"""The tiny transformers are worth testing with, and there is one for every transformer class of diffusers."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import transformers as classes
from torch import Tensor, nn

from tests.breadth import first_of
from tests.tiny.transformers import TRANSFORMERS, UNBUILT
from tests.tiny.transformers_entry import IMAGE, IMAGE_TEXT, VIDEO, VIDEO_TEXT, Tiny, noise

MILLION = 1_000_000
WIDE = {"HunyuanVideo15Transformer3DModel": "its second text projection is 2048 wide in any configuration"}
SEEN = 3e-4
"""How much of the first token's result must change with the last token, relatively: thirty times an exact error."""


OFTEN = (
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "PixArtTransformer2DModel",
    "WanTransformer3DModel",
)
"""In every run; whether the others are worth testing with is asked with `make test-all`."""


@pytest.fixture(params=first_of(TRANSFORMERS, *OFTEN))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return TRANSFORMERS[request.param]


@torch.no_grad()
def _result(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    """What was denoised: one tensor, or one for each sample of the batch."""
    sample = model(**arguments)
    while not isinstance(sample, Tensor | list):
        sample = sample[0]
    return sample if isinstance(sample, list) else [sample]


def _index(layout: str, group_rank: int) -> tuple[slice | int, ...]:
    return tuple(slice(None) if dim in "BC" else group_rank for dim in layout)


def _first(tiny: Tiny, result: Tensor, call: dict[str, Any]) -> Tensor:
    """The first image token's result; a model may give its text back as well, in front."""
    layout = tiny.output_layout or tiny.layout
    extra = result.shape[1] - call[tiny.tokens].shape[1] if layout == tiny.layout == "BSC" else 0
    return result[_index(layout, extra)]


def _disturb_last(tiny: Tiny, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with another last token."""
    value = arguments[tiny.tokens]
    many = value if isinstance(value, list) else [value]
    changed = [tensor.clone() for tensor in many]
    for tensor in changed:
        last = tensor[_index(tiny.layout, -1)]
        last.copy_(3 * noise(*last.shape, seed=7))
    return arguments | {tiny.tokens: changed if isinstance(value, list) else changed[0]}


def _moved(tiny: Tiny, variant: int) -> list[float]:
    """How much of the first token's result changes with the last token, for each result that comes out."""
    model = tiny.build()
    results = _result(model, tiny.call(variant)), _result(model, _disturb_last(tiny, tiny.call(variant)))
    pairs = [[_first(tiny, result, tiny.call(variant)) for result in pair] for pair in zip(*results, strict=True)]
    return [((after - before).norm() / before.norm()).item() for before, after in pairs]


@pytest.mark.parametrize("variant", [0, 1])
def test_the_first_token_sees_the_last(tiny: Tiny, variant: int) -> None:
    for moved in _moved(tiny, variant):
        assert moved == 0 if tiny.isolated else moved > SEEN


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "PixArtTransformer2DModel", "WanTransformer3DModel"])
def test_without_attention_between_tokens_it_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def itself_only(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return value if value.shape == query.shape else torch.zeros_like(query)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", itself_only)
    assert _moved(TRANSFORMERS[name], 0) == [0.0]


def test_is_tiny_and_finite(tiny: Tiny) -> None:
    model = tiny.build()
    limit = 5 * MILLION if tiny.name in WIDE else MILLION
    assert sum(parameter.numel() for parameter in model.parameters()) < limit
    assert all(torch.isfinite(result).all() for variant in (0, 1) for result in _result(model, tiny.call(variant)))


def test_gives_the_same_result_every_time_and_leaves_the_random_state_alone(tiny: Tiny) -> None:
    torch.manual_seed(1)
    first = _result(tiny.build(), tiny.call(0))
    state = torch.random.get_rng_state()
    second = _result(tiny.build(), tiny.call(0))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _size(value: Any) -> int:
    return sum(map(_size, value)) if isinstance(value, list | tuple) else value.numel()


def test_its_calls_are_of_two_sizes(tiny: Tiny) -> None:
    small, large = (_size(tiny.call(variant)[tiny.tokens]) for variant in (0, 1))
    assert (small == large) is bool(tiny.fixed)


@pytest.mark.parametrize(("grids", "texts"), [(IMAGE, IMAGE_TEXT), (VIDEO, VIDEO_TEXT)])
def test_a_rank_has_as_many_image_tokens_as_there_is_text(grids: Any, texts: Any) -> None:
    uneven, even = map(math.prod, grids)
    assert uneven % 2
    assert uneven % 3
    assert (math.ceil(uneven / 3), even / 2) == texts


def _installed() -> set[str]:
    modules = [
        importlib.import_module(f"{classes.__name__}.{it.name}") for it in pkgutil.iter_modules(classes.__path__)
    ]
    return {
        name
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, diffusers.ModelMixin) and kind.__module__ == module.__name__
    }


def test_every_transformer_class_has_an_entry_or_a_reason() -> None:
    known = TRANSFORMERS.keys() | UNBUILT.keys()
    missing = sorted(_installed() - known)
    assert not missing, f"no tiny configuration of {', '.join(missing)}"


def test_no_class_is_both_built_and_excused() -> None:
    assert not TRANSFORMERS.keys() & UNBUILT.keys()
    assert all(UNBUILT.values())
