"""What is packed is unpacked, to the last bit; what cannot hold is refused before it travels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.stream.base_session import BaseSession
from patchpar.stream.events import Parameter, Prompt, Reference, pack, unpack
from patchpar.stream.messages import PromptUpdate
from tests.tensors import noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_and_unpacked(dtype: torch.dtype) -> None:
    text, latents = noise(1, 5, 7).to(dtype), noise(1, 4, 1, 3, 3)
    sent = (
        Prompt(text=text, transition="blend", over=2),
        Reference(latents=latents),
        Parameter(name="audio_scale", value=0.1),
    )
    first, second, third = unpack(pack(sent))
    assert isinstance(first, Prompt)
    assert (first.transition, first.over, first.text.dtype) == ("blend", 2, dtype)
    assert torch.equal(first.text, text)
    assert isinstance(second, Reference)
    assert torch.equal(second.latents, latents)
    assert third == sent[2]


def test_a_view_is_packed_as_it_looks() -> None:
    whole = noise(2, 5, 7)
    (change,) = unpack(pack((Reference(latents=whole.transpose(0, 2)[:, 1:3]),)))
    assert isinstance(change, Reference)
    assert torch.equal(change.latents, whole.transpose(0, 2)[:, 1:3])


@pytest.mark.parametrize("options", [{"transition": "fade"}, {"transition": "blend"}, {"over": 3}])
def test_transitions_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        PromptUpdate(text="a", **options)


class Session(BaseSession[None, int]):
    """Orders nothing."""

    def _drive(self) -> None: ...

    def _order_cancel(self) -> None: ...

    def _effect(self, number: int) -> int:
        return number

    def _upcoming(self) -> int:
        return 0

    def _order(self) -> None:
        pass


def test_credit_is_bounded() -> None:
    driver = Session(2, "block", 1)
    assert [driver._take_credit() for _ in range(3)] == [True, True, False]
    driver._give_back()
    assert driver.in_flight == 1
    assert driver._take_credit()
    with pytest.raises(PlanError, match="credit=0"):
        Session(0, "block", 1)


def test_a_parameter_that_is_none() -> None:
    with pytest.raises(PlanError, match="'loudness' is unknown: use one of audio_scale"):
        Parameter(name="loudness", value=1)
    for value in (math.nan, math.inf, 1e300, "1"):
        with pytest.raises(PlanError, match="it must be a number from -10000 to 10000"):
            Parameter(name="audio_scale", value=value)  # type: ignore[arg-type]
