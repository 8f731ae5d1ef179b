"""What is packed is unpacked, to the last bit; what cannot hold is refused before it travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.stream.events import Parameter, Prompt, Reference, StreamEvent, pack, unpack
from patchpar.stream.rank_driver import BlockCredits
from tests.tensors import noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_and_unpacked(dtype: torch.dtype) -> None:
    text, latents = noise(1, 5, 7).to(dtype), noise(1, 4, 1, 3, 3)
    sent = (
        StreamEvent(block=3, change=Prompt(text=text, transition="blend", over=2)),
        StreamEvent(block=3, change=Reference(latents=latents)),
        StreamEvent(block=4, change=Parameter(name="audio_scale", value=0.1)),
    )
    first, second, third = unpack(pack(sent))
    assert (first.block, second.block) == (3, 3)
    assert isinstance(first.change, Prompt)
    assert (first.change.transition, first.change.over, first.change.text.dtype) == ("blend", 2, dtype)
    assert torch.equal(first.change.text, text)
    assert isinstance(second.change, Reference)
    assert torch.equal(second.change.latents, latents)
    assert third == sent[2]


def test_a_view_is_packed_as_it_looks() -> None:
    whole = noise(2, 5, 7)
    (event,) = unpack(pack((StreamEvent(block=0, change=Reference(latents=whole.transpose(0, 2)[:, 1:3])),)))
    assert isinstance(event.change, Reference)
    assert torch.equal(event.change.latents, whole.transpose(0, 2)[:, 1:3])


@pytest.mark.parametrize("options", [{"transition": "fade"}, {"transition": "blend"}, {"over": 3}])
def test_transitions_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Prompt(text=noise(1, 2, 3), **options)


def test_credit_is_bounded() -> None:
    credit = BlockCredits(2)
    assert [credit.take() for _ in range(3)] == [True, True, False]
    credit.give_back()
    assert credit.in_flight == 1
    assert credit.take()
    with pytest.raises(PlanError, match="limit=0"):
        BlockCredits(0)


def test_a_parameter_that_is_none() -> None:
    with pytest.raises(PlanError, match="'loudness' is unknown: use one of audio_scale"):
        Parameter(name="loudness", value=1)
