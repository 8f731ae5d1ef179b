"""A method that fails half-way leaves nothing, or ranks that are started anew; one that fails at once leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from patchpar.launch.remote_errors import take_down
from patchpar.pipeline.failed_methods import done_or_undone
from tests.tiny import build


def nothing(pipe: Any) -> None: ...


def a_module(pipe: Any) -> None:
    pipe.unet.conv_in = nn.Identity()


def a_weight(pipe: Any) -> None:
    with torch.no_grad():
        pipe.unet.conv_in.weight.add_(1)


def a_network(pipe: Any) -> None:
    pipe.unet = nn.Identity()


@pytest.mark.parametrize(
    ("change", "method", "is_left"),
    [
        (nothing, "fuse_lora", False),
        (a_module, "load_ip_adapter", True),
        (a_weight, "fuse_lora", True),
        (a_network, "load_textual_inversion", True),
        (a_weight, "encode_prompt", False),  # no later call depends on one that only computes
    ],
)
def test_what_a_method_has_changed_before_it_fails(change: Callable[[Any], None], method: str, is_left: bool) -> None:
    pipe = build("sdxl").pipe

    def fails() -> None:
        change(pipe)
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way") as caught:
        done_or_undone(pipe, method, fails)
    assert take_down(caught.value).left_changes == is_left


def after_the_first(layers: list[Any]) -> None:
    layers[1].merge = raising


def within_the_first(layers: list[Any]) -> None:
    """As PEFT does where an adapter has a bias, and the layer none."""
    layers[0].lora_bias["default"] = True
    layers[0].get_base_layer().bias = None


def before_the_first(layers: list[Any]) -> None:
    layers[0].merge = raising


def raising(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("half-way")


@pytest.mark.parametrize(
    ("fail", "is_left"), [(after_the_first, True), (within_the_first, True), (before_the_first, False)]
)
def test_weights_that_an_adapter_was_fused_into(fail: Callable[[list[Any]], None], is_left: bool) -> None:
    """PEFT writes to them through `data`, which counts no write."""
    pipe = build("sdxl").pipe
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    layers = [module for module in pipe.unet.modules() if isinstance(module, LoraLayer)]
    fail(layers)
    with pytest.raises(RuntimeError) as caught:
        done_or_undone(pipe, "fuse_lora", lambda: pipe.fuse_lora(components=["unet"]))
    assert take_down(caught.value).left_changes == is_left


@pytest.mark.parametrize(
    ("name", "by_position", "is_left"), [("ink", False, True), ("ink", True, True), ("snow", False, False)]
)
def test_an_adapter_that_another_replaces(name: str, by_position: bool, is_left: bool) -> None:
    """diffusers replaces that of the UNet, and then refuses that of a text encoder; one that is not there, at once."""
    pipe = build("sdxl").pipe
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "ink")
    layers = {key: x.clone() for key, x in get_peft_model_state_dict(pipe.unet, adapter_name="ink").items()}
    other = {f"unet.{key}": value + 1 for key, value in layers.items()}
    other["text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(2, 8)
    args, kwargs = ((other, name, True), {}) if by_position else ((other, name), {"hotswap": True})
    with pytest.raises(ValueError, match="hotswap") as caught:
        done_or_undone(pipe, "load_lora_weights", pipe.load_lora_weights, args, kwargs)
    assert take_down(caught.value).left_changes == is_left
    after = get_peft_model_state_dict(pipe.unet, adapter_name="ink")
    assert is_left != all(torch.equal(after[key], value) for key, value in layers.items())


def test_one_that_succeeds() -> None:
    pipe = build("sdxl").pipe
    assert done_or_undone(pipe, "fuse_lora", lambda: a_weight(pipe)) is None
