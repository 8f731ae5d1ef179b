"""A method that fails half-way leaves nothing, or ranks that are started anew; one that fails at once leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def test_one_that_succeeds() -> None:
    pipe = build("sdxl").pipe
    assert done_or_undone(pipe, "fuse_lora", lambda: a_weight(pipe)) is None
