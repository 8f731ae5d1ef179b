"""Ranks with a GPU each, which exchange through NCCL. `python -m benchmarks.gpu.battery` runs these.

`--ranks-per-gpu` lets ranks share a GPU, and `--gpu-device cpu` tries the tests on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from patchpar.comm.transport.torch_groups import ABORT_SECONDS
from tests.gpu.cards import cards_of, nccl_on_one_card
from tests.gpu.pools import ROUNDING, check, on_ranks, started

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def each(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """Ranks with a card each, which exchange through NCCL; what it yields runs a function on them."""
    with nccl_on_one_card(request.config), started(cards_of(request.config)) as pool:
        yield lambda function, *args: pool.call("run", function, len(pool.devices), "auto", args)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_ranks_with_a_card_each(each: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    check(each("tests.gpu.on_ranks:parity", "sdxl", dtype), dtype)


def test_as_many_ranks_as_cards(cards: Callable[..., list[str]]) -> None:
    devices = cards(least=5, most=8, on_cpu=5)
    found = on_ranks(devices, "tests.gpu.on_ranks:parity", "sdxl", torch.float16, "exact", 8 * len(devices))
    check(found, torch.float16)


def test_small_exchanges_in_symmetric_memory(kind: str, cards: Callable[..., list[str]]) -> None:
    """By a kernel that writes the other cards' memory; where the cards cannot, all ranks go on with NCCL."""
    if kind == "cpu":
        pytest.skip("workers of a CPU have no NCCL")
    devices = cards()
    found = on_ranks(devices, "tests.gpu.on_ranks:parity_in_symmetric_memory", "sdxl", torch.float16)
    check([errors for errors, _ in found], torch.float16)
    others = sorted({torch.device(device).index for device in devices} - {0, None})
    accessible = bool(others) and all(torch.cuda.can_device_access_peer(0, other) for other in others)
    assert {has_memory for _, has_memory in found} == {accessible}


@pytest.mark.parametrize("strategy", ["exact", "displaced:warmup_steps=1", "pcpp:warmup_steps=1", "fresh-edges"])
def test_graphs_of_steps_with_nccl_equal_the_steps(kind: str, each: Callable[..., list[Any]], strategy: str) -> None:
    """Kernels and messages of a step as one CUDA graph, on ranks with a card each."""
    if kind == "cpu":
        pytest.skip("a CPU has no graphs")
    evaluations = 7
    for differences, replays in each("tests.gpu.on_ranks:replayed", "sdxl", torch.float16, strategy, evaluations):
        assert max(differences) <= ROUNDING[torch.float16] / 10
        assert replays == evaluations - (2 if strategy == "exact" else 3)


@pytest.mark.parametrize("connects", [True, False])
def test_a_rank_that_does_not_come(kind: str, each: Callable[..., list[Any]], connects: bool) -> None:
    """The others are free again by the deadline, and the next exchanges work."""
    if kind == "cpu":
        pytest.skip("workers of a CPU have no NCCL")
    seconds, message = each("tests.gpu.on_ranks:awaited", 4.0, connects)[0]
    assert seconds < 4.0 + ABORT_SECONDS
    assert "a message that nobody sends" in message
    check(each("tests.gpu.on_ranks:parity", "sdxl", torch.float32), torch.float32)


def test_groups_end_at_once_though_a_graph_has_their_messages(kind: str, each: Callable[..., list[Any]]) -> None:
    """NCCL waits until no graph is left, and the kernels of one group hold up the end of another."""
    if kind == "cpu":
        pytest.skip("a CPU has no graphs")
    for seconds, message in each("tests.gpu.on_ranks:aborted"):
        assert seconds < ABORT_SECONDS
        assert "cannot be replayed" in message
