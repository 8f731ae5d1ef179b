"""How calls of one form are told apart from others while messages between stages are on their way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from patchpar.comm.transport import TensorSpec
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.stages.block_outputs import OutputStructure, Placeholders
from patchpar.shard.stages.layout import RecordedCall, StageLayout
from patchpar.shard.stages.stage_pass import OtherShapes, StagePass

FORM = OutputStructure(None, ())


def layout(*tokens: int, carried: tuple[tuple[int, ...], ...]) -> StageLayout:
    """Three stages of blocks 0 to 1, 2 to 3 and 4 to 5, each block given so many tokens."""
    calls = [
        RecordedCall(f"blocks.{n}", (TensorSpec((each,), torch.float32),), FORM, 1.0) for n, each in enumerate(tokens)
    ]
    return StageLayout(tuple(calls), 0, (2, 4), carried, FORM)


KNOWN = layout(9, 9, 9, 7, 7, 7, carried=((1,), (3,)))


def run_all(stage: StagePass) -> None:
    """A pass in which every block is given nine tokens."""
    for number in range(6):
        stage(number, f"blocks.{number}", partial(lambda _: None, torch.zeros(9)))


@pytest.mark.parametrize(
    ("carried", "between"),
    [
        (((1,), (3,)), [True] * 6),
        (((1,), (0, 3)), [True, False, False, False, True, True]),  # stage 2 waits at block 0 until block 3 has run
        (((0, 1), (3,)), [True, False, True, True, True, True]),
    ],
)
def test_where_no_stage_waits_for_another(carried: tuple[tuple[int, ...], ...], between: list[bool]) -> None:
    found = replace(KNOWN, carried=carried)
    assert [found.is_between_messages(number) for number in range(6)] == between


@pytest.mark.parametrize(("carried", "refusal"), [(((1,), (3,)), OtherShapes), (((1,), (1, 3)), UnsupportedModel)])
def test_a_block_that_is_given_other_shapes(carried: Any, refusal: type[UnsupportedModel]) -> None:
    """The call can be made again where no stage waits, and nothing is on its way any more."""
    sent: list[Mock] = []

    def send(*_: Any) -> Mock:
        sent.append(Mock())
        return sent[-1]

    axis = Axis("stage", 0, 3, (0, 1, 2))
    known = replace(KNOWN, carried=carried)
    stage = StagePass((SimpleNamespace(send=send), axis), [known], Placeholders(torch.device("cpu")), alone=False)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match=r"gives blocks.3 other shapes.*use stage=1") as caught:
        run_all(stage)
    assert caught.type is refusal
    (message,) = sent
    assert message.wait.called == (refusal is OtherShapes)


def test_other_calls_send_the_same_until_they_differ() -> None:
    shorter = layout(9, 9, 9, 5, 5, 5, carried=KNOWN.carried)
    assert shorter.begins_as(KNOWN)
    assert not replace(shorter, carried=((0, 1), (3,))).begins_as(KNOWN), "the first cut comes before they differ"
    assert not replace(shorter, carried=((1,), (2, 3))).begins_as(KNOWN), "stage 2 would wait at block 2"
    assert layout(5, 5, 5, 5, 5, 5, carried=((0, 1), (0, 3))).begins_as(KNOWN), "the first block tells them apart"
