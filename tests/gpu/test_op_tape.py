"""The tape that stands in for a CUDA graph does what a graph does to memory that the process does not keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.shard.graphs.recorder import CaptureRefused
from tests.conformance.stand_in import SimulatedRank
from tests.gpu.op_tape import MemoryIsFreedError, OpTape


def taped(step: Callable[[], Any]) -> OpTape:
    tape = OpTape(SimulatedRank())
    tape.record(step)
    return tape


def test_a_replay_reads_what_lies_at_the_addresses_by_then() -> None:
    x = torch.ones(2, 3)
    tape = taped(lambda: x.t()[1:] * 2)
    x.fill_(4.0)
    tape.replay()
    assert torch.equal(tape.output, torch.full((2, 2), 8.0))


def test_memory_of_before_is_not_kept() -> None:
    held: list[Tensor] = [torch.ones(3)]
    tape = taped(lambda: held[0][1:] + 1)
    tape.replay()
    held[0] = torch.ones(3)
    with pytest.raises(MemoryIsFreedError, match=r"add of a replay comes to a tensor \(2,\) of torch.float32"):
        tape.replay()


def test_a_number_of_python_is_an_argument_of_a_kernel() -> None:
    """torch passes it to the operator as a tensor, which ends with the step."""
    numbers = [torch.tensor(1.0)]

    def step() -> Tensor:
        x = torch.zeros(2)
        x[0] = 0.5
        return x + numbers[0]

    tape = taped(step)
    tape.replay()
    assert tape.output.tolist() == [1.5, 1.0]
    numbers.clear()
    with pytest.raises(MemoryIsFreedError, match="add of a replay"):
        tape.replay()


def test_values_of_python_are_frozen() -> None:
    values = [1.0, 2.0]
    tape = taped(lambda: torch.tensor(values) + torch.tensor(values[0]))
    values[0] = 3.0
    tape.replay()
    assert tape.output.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.item, Tensor.nonzero])
def test_what_reads_values_is_refused(read: Callable[[Tensor], object]) -> None:
    """Of a tensor on the CPU some of these are no operators."""
    x = torch.ones(1)
    with pytest.raises(CaptureRefused, match="reads"):
        taped(lambda: read(x + 1))


def write_at_mask(x: Tensor) -> None:
    x[x > 1] = torch.zeros(2)


@pytest.mark.parametrize("read", [lambda x: x[x > 1], lambda x: x.masked_select(x > 1), write_at_mask])
def test_masks_that_say_how_many_numbers_there_are_are_refused(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(CaptureRefused, match="reads a value"):
        taped(lambda: read(torch.ones(2) + 1))


def test_one_number_is_written_by_a_mask() -> None:
    x = torch.tensor([1.0, 3.0])

    def step() -> Tensor:
        found = x + 0
        found[found > 2] = 0.5
        return found[torch.arange(2)]

    tape = taped(step)
    x.copy_(torch.tensor([3.0, 1.0]))
    tape.replay()
    assert tape.output.tolist() == [0.5, 1.0]


def test_memory_of_before_is_as_it_was_after_the_recording() -> None:
    x = torch.ones(3)
    tape = taped(lambda: x.add_(1))
    assert x.tolist() == [1.0] * 3
    tape.replay()
    assert x.tolist() == [2.0] * 3


def test_a_recording_leaves_no_values() -> None:
    """What a module keeps of it is read before a replay, or instead of one."""
    kept = list[Tensor]()
    tape = taped(lambda: kept.append(torch.ones(2) + 1))
    assert kept[0].isnan().all()
    tape.replay()
    assert kept[0].tolist() == [2.0, 2.0]
