"""A promise is an ordinary tensor that waits at its first use, and never shows values before they are here."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchpar.comm.async_tensor import AsyncMessage
from patchpar.shard.batch import Batch

Tensor = torch.Tensor
VALUES = torch.arange(24.0).reshape(2, 3, 4)
OTHER = torch.full((2, 3, 4), 0.5)


class Source:
    """Hands out VALUES and counts how often."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.fetched = 0
        self.delivery = AsyncMessage([((2, 3, 4), dtype)], torch.device("cpu"), self.fetch)
        self.pending = self.delivery.tensors[0]

    def fetch(self) -> list[Tensor]:
        self.fetched += 1
        return [VALUES]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.shape == (2, 3, 4),
        lambda x: x.dtype == torch.float32,
        lambda x: x.device.type == "cpu",
        lambda x: x.dim() == x.ndim == 3,
        lambda x: len(x) == 2,
        lambda x: x.size(1) == 3,
        lambda x: isinstance(x, Tensor) and torch.is_tensor(x),
        lambda x: x.is_floating_point(),
        lambda x: hash(x) is not None,
    ],
)
def test_questions_that_need_no_values(ask: Callable[[Tensor], bool]) -> None:
    source = Source()
    assert ask(source.pending)
    assert source.fetched == 0


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x[:, :2],
        lambda x: x[0],
        lambda x: x[..., None, 1],
        lambda x: x.chunk(2)[1],
        lambda x: torch.chunk(x, 2, dim=-1)[0],
        lambda x: x.unbind(1)[2],
        lambda x: x.permute(2, 0, 1),
        lambda x: x.transpose(0, 1).unsqueeze(0)[0, :, 1],
        lambda x: x.mT,
        lambda x: x.data,
        lambda x: x.flatten(1),
        lambda x: x.view(6, 4),
        lambda x: x.reshape(4, 6).detach(),
        lambda x: x.contiguous(),
        lambda x: x.float(),
        lambda x: x.double(),
        lambda x: x[:, :2].to(torch.float64)[0],
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.clone(),
    ],
)
def test_parts_and_copies_are_promised_as_well(part: Callable[[Tensor], Tensor]) -> None:
    source = Source()
    result = part(source.pending)
    assert source.fetched == 0
    assert torch.equal(result + 0, part(VALUES) + 0)
    assert result.dtype == part(VALUES).dtype
    assert source.fetched == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + OTHER,
        lambda x: OTHER - x,
        lambda x: 3 * (x - OTHER),
        lambda x: torch.cat([OTHER, x]),
        lambda x: torch.where(OTHER > 0, x, OTHER),
        lambda x: torch.lerp(OTHER, x, 2.0),
        lambda x: torch.norm(x, dim=-1, keepdim=True),
        lambda x: x.std(dim=[1, 2]),
        lambda x: x[x > 3],
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.permute(1, 0, 2).reshape(-1),
        lambda x: torch.nn.functional.silu(x),
        lambda x: OTHER.clone().copy_(x),
        lambda x: OTHER.clone().add_(x),
        lambda x: x.clone().mul_(2),
        lambda x: torch.from_numpy(x.numpy().copy()),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.tensor(x[1, 2, 3].item()),
        lambda x: torch.stack(list(x)),
        lambda x: torch.ops.aten.mul(x, 2),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: copy.deepcopy(x),
        lambda x: torch.einsum("abc,abc->a", x, OTHER),
        lambda x: torch.nn.Linear(4, 1, bias=False).requires_grad_(False)(x) * 0 + x.sum(),
    ],
)
def test_every_use_waits(use: Callable[[Tensor], Tensor]) -> None:
    source = Source()
    result = use(source.pending)
    assert torch.equal(result, use(VALUES))
    assert source.fetched == 1
    assert torch.equal(source.pending, VALUES)


def test_an_index_that_has_not_arrived_is_waited_for() -> None:
    index = AsyncMessage([((), torch.int64)], torch.device("cpu"), lambda: [torch.tensor(1)]).tensors[0]
    assert torch.equal(Source().pending[index], VALUES[1])


def test_a_change_in_place_is_seen_by_all_who_hold_it() -> None:
    source = Source()
    part, copied = source.pending[0], source.pending.clone()
    source.pending.mul_(2)
    assert torch.equal(source.pending, VALUES * 2)
    assert torch.equal(part, VALUES[0] * 2)
    assert torch.equal(copied, VALUES)


def test_a_part_at_hand_is_good_until_the_rest_is_needed() -> None:
    delivery = AsyncMessage([((2, 3, 4), torch.float32)], torch.device("cpu"), lambda: [VALUES], [VALUES[:1]])
    whole = delivery.tensors[0]
    assert torch.equal(Batch(2).part([whole], 0, 2)[0], VALUES[:1])
    assert delivery.pending
    whole.mul_(2)  # in place: the share that was at hand is out of date
    assert torch.equal(Batch(2).part([whole], 0, 2)[0], VALUES[:1] * 2)


def test_printing_waits() -> None:
    assert "23." in repr(Source().pending)


def test_results_are_plain_tensors() -> None:
    assert type(Source().pending + 1) is Tensor


def test_a_failure_is_raised_at_every_use() -> None:
    def fail() -> Any:
        raise RuntimeError("rank 1 is gone")

    delivery = AsyncMessage([((2,), torch.float32)], torch.device("cpu"), fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            delivery.tensors[0] + 1


def test_memory_goes_with_the_last_who_holds_it() -> None:
    gc.disable()
    try:
        delivery = AsyncMessage([((2, 3, 4), torch.float32)], torch.device("cpu"), lambda: [VALUES])
        memory, part = weakref.ref(delivery), delivery.tensors[0][0]
        del delivery
        assert memory() is not None
        del part
        assert memory() is None
    finally:
        gc.enable()


def test_nothing_looks_like_a_result_before_it_is_here() -> None:
    """Whatever reads the memory behind the promise's back finds no number."""
    source = Source()
    assert torch.isnan(source.delivery._buffers[0]).all()
