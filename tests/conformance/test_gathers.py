"""Gathers in one operation of tensors of several dtypes, which lie in one row of bytes for each rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.strategies.cfg.exchange import PredictionExchange, PredictionTime
from tests.conformance.test_faults import checked

WORLD = 3


def prediction(rank: int, size: int) -> Tensor:
    return (torch.arange(size) + 100.0 * rank).to(torch.bfloat16)


@pytest.mark.parametrize("size", range(1, 10))
def test_predictions_of_any_size_come_with_their_stamps(size: int) -> None:
    """In half precision a row may end where no stamp of 8 bytes can begin."""

    def exchanged(comm: Communicator, axis: Axis, _: object) -> list[Tensor]:
        return PredictionExchange(comm, axis).exchange(prediction(axis.rank, size), PredictionTime(1, 0))

    found, faults = checked(exchanged)
    assert faults == []
    for of_rank in found:
        assert all(torch.equal(x, prediction(rank, size)) for rank, x in enumerate(of_rank))


@pytest.mark.parametrize("more", [0, 1, 2])
def test_shares_of_several_dtypes_and_sizes(more: int) -> None:
    def tensors(rank: int) -> list[Tensor]:
        return [torch.full((5 + more * rank,), rank, dtype=torch.int8), torch.full((3,), float(rank))]

    def gathered(comm: Communicator, axis: Axis, _: object) -> list[list[Tensor]]:
        pending = AllGather(comm, axis, "kv", "attn1").start(
            tensors(axis.rank), lambda rank: list(map(TensorSpec.of, tensors(rank)))
        )
        return pending.wait()

    found, faults = checked(gathered)
    assert faults == []
    for of_rank in found:
        assert all(all(map(torch.equal, of_rank[rank], tensors(rank))) for rank in range(WORLD))
