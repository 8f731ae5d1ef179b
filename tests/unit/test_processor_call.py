"""A layer of diffusers calls its processor without looking up its signature, where that changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention
from diffusers.models.transformers.transformer_flux2 import Flux2Attention, Flux2ParallelSelfAttention
from torch import Tensor, nn

from patchpar.shard.processor_call import ProcessorCall, looks_up_signatures

SIZES = {"query_dim": 8, "heads": 2, "dim_head": 4}
IMAGE, TEXT = torch.linspace(-1, 1, 40).view(1, 5, 8), torch.linspace(-1, 1, 24).view(1, 3, 8)
TABLE = torch.linspace(0, 1, 20).view(5, 4).cos(), torch.linspace(0, 1, 20).view(5, 4).sin()
LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "unet": lambda: Attention(**SIZES),
    "flux": lambda: FluxAttention(**SIZES, added_kv_proj_dim=8, context_pre_only=False),
    "flux, single": lambda: FluxAttention(**SIZES, pre_only=True),
    "flux 2": lambda: Flux2Attention(**SIZES, added_kv_proj_dim=8),
    "flux 2, single": lambda: Flux2ParallelSelfAttention(**SIZES),
}
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("unet", (IMAGE,), {}),
    ("unet", (IMAGE, TEXT), {}),
    ("unet", (IMAGE, None, torch.zeros(1, 5)), {}),
    ("unet", (IMAGE,), {"encoder_hidden_states": TEXT}),
    ("flux", (), {"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
    ("flux, single", (), {"hidden_states": IMAGE, "image_rotary_emb": TABLE}),
    ("flux 2", (IMAGE, TEXT), {"attention_mask": None}),
    ("flux 2, single", (), {"hidden_states": IMAGE, "image_rotary_emb": TABLE}),
]


def layer(name: str) -> Any:
    torch.manual_seed(0)
    return LAYERS[name]().eval().requires_grad_(False)


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a signature is looked up")


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS, ids=[f"{name} {len(a) + len(k)}" for name, a, k in CALLS])
def test_the_processor_gets_what_forward_passes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = layer(name)
    assert looks_up_signatures(attention)
    wanted = attention(*args, **kwargs)
    monkeypatch.setattr(inspect, "signature", refused)
    with pytest.raises(AssertionError, match="looked up"):
        attention(*args, **kwargs)
    found = ProcessorCall().run(attention, attention.forward, args, kwargs)
    found, wanted = ([x] if isinstance(x, Tensor) else x for x in (found, wanted))
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


def test_a_processor_set_later_is_called() -> None:
    attention, call = layer("unet"), ProcessorCall()
    forward = attention.forward
    call.run(attention, forward, (torch.zeros(1, 5, 8),), {"attention_mask": None})
    attention.processor = lambda attn, x, **_: x + 1
    found = call.run(attention, forward, (torch.zeros(1, 5, 8),), {"attention_mask": None})
    assert torch.equal(found, torch.ones(1, 5, 8))


class Further(nn.Module):
    """A processor with an argument of its own."""

    def __call__(self, *_: Any, further: Any = None, **__: Any) -> Any:
        return further


def test_forwards_of_other_code_and_arguments_of_processors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the forward that the same layer had before was diffusers'."""
    attention, call = layer("unet"), ProcessorCall()
    call.run(attention, attention.forward, (IMAGE,), {})
    assert call.run(attention, lambda *args, **kwargs: (args, kwargs), (1,), {"scale": 2}) == ((1,), {"scale": 2})
    attention.processor = Further()
    with monkeypatch.context() as patched:
        patched.setattr(inspect, "signature", refused)
        assert call.run(attention, attention.forward, (IMAGE,), {}) is None
        with pytest.raises(AssertionError, match="looked up"):
            call.run(attention, attention.forward, (IMAGE,), {"further": 3})
    assert call.run(attention, attention.forward, (IMAGE,), {"further": 3}) == 3
    assert not looks_up_signatures(nn.Linear(1, 1))
    forward = Attention.forward

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return "wrapped", forward(*args, **kwargs)

    monkeypatch.setattr(Attention, "forward", wrapped)
    assert not looks_up_signatures(attention)
    assert call.run(attention, attention.forward, (IMAGE,), {}) == ("wrapped", None)
