"""A layer of diffusers calls its processor without looking up its signature, where that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import Attention

from patchpar.shard.unet.attention_hook import without_signature


@pytest.fixture
def layer() -> Attention:
    return Attention(query_dim=8, heads=2, dim_head=4).eval()


def refused(*_: Any) -> Any:
    raise AssertionError("a signature is looked up")


@pytest.mark.parametrize("args", [(), (torch.ones(1, 3, 8),), (None, torch.zeros(1, 5))], ids=["own", "text", "mask"])
def test_the_processor_gets_what_forward_passes(
    layer: Attention, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 5, 8)
    wanted = layer(x, *args)
    monkeypatch.setattr(attention_processor.inspect, "signature", refused)
    with pytest.raises(AssertionError, match="looked up"):
        layer(x, *args)
    assert torch.equal(without_signature(layer, layer.forward, {})(x, *args), wanted)


def test_a_processor_set_later_is_called(layer: Attention) -> None:
    attend = without_signature(layer, layer.forward, {"attention_mask": None})
    layer.processor = lambda attn, x, **_: x + 1
    assert torch.equal(attend(torch.zeros(1, 5, 8), attention_mask=None), torch.ones(1, 5, 8))


def test_forwards_of_other_code_and_arguments_of_processors_stay(layer: Attention) -> None:
    def others(*_: Any, **__: Any) -> None: ...

    assert without_signature(layer, others, {}) is others
    assert without_signature(layer, layer.forward, {"ip_adapter_masks": None}) == layer.forward
