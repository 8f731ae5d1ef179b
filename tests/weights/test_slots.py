"""What comes into which slot and when, from a store whose bytes are in a slot no sooner than they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import alone
from patchpar.errors import ExchangeError
from patchpar.launch.inline import InlineContext
from patchpar.plan.mesh import Axis
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from patchpar.shard.weights.packed import NAN_BYTE, CopyMemory, PackedBlock
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.shard.weights.stores import BlockStore
from tests.weights import networks

CPU = torch.device("cpu")


class LateTransfer:
    """A block on its way: NaN in the slot until it is waited for."""

    def __init__(self, store: LateStore, index: int, slot: Tensor) -> None:
        self._store, self._index, self._slot = store, index, slot

    def wait(self) -> None:
        store = self._store
        assert store.on_their_way.pop(self._slot.data_ptr()) is self
        shard = store.shards[self._index]
        self._slot[: shard.numel()].copy_(shard)


class LateStore(BlockStore):
    """The store of one rank. `brought`: blocks in the order in which they came."""

    is_collective = False

    def __init__(self) -> None:
        super().__init__(Axis("patch", 0, 1, (0,)), CPU)
        self.shards: list[Tensor] = []
        self.brought: list[int] = []
        self.on_their_way: dict[int, LateTransfer] = {}

    @property
    def num_bytes(self) -> int:
        return sum(shard.numel() for shard in self.shards)

    def reserve(self, blocks: Sequence[PackedBlock]) -> None:
        self._blocks = blocks

    def keep(self, index: int, copy: CopyMemory) -> None:
        self.shards.append(torch.empty(self.rows(self._blocks[index]), dtype=torch.uint8))
        self._blocks[index].write(self.shards[-1], copy=copy)

    def bring(self, index: int, slot: Tensor) -> Callable[[], LateTransfer]:
        def start() -> LateTransfer:
            assert slot.data_ptr() not in self.on_their_way, "two blocks come into one slot"
            slot.fill_(NAN_BYTE)
            self.brought.append(index)
            found = self.on_their_way[slot.data_ptr()] = LateTransfer(self, index, slot)
            return found

        return start

    def close(self) -> None:
        self.shards = []


def divided(network: nn.Module) -> tuple[ShardedWeights, LateStore]:
    store = LateStore()
    weights = ShardedWeights(network, store)
    weights.join(Communicator(alone(InlineContext("cpu"))))
    return weights, store


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def test_orders_that_change_between_calls() -> None:
    """The block that was started in advance is another one then: its transfer ends before the next into its slot."""
    network: Any = networks.build("chain")
    divided(network)
    plain: Any = networks.build("chain")
    for order in ((0, 1, 2, 3, 4), (0, 3, 1, 2), (2, 1, 0), (0, 1, 2, 3, 4), (0, 2, 4, 1), (0, 1, 2, 3, 4)):
        network.order = plain.order = order
        assert torch.equal(network(networks.sample()), plain(networks.sample()))


def test_a_block_comes_while_the_one_runs_that_it_followed_in_the_last_call() -> None:
    network: Any = networks.build("chain")
    _, store = divided(network)
    network(networks.sample())
    network.order = (4, 3, 2, 1, 0)
    network(networks.sample())
    seen: list[tuple[int, int]] = []
    for index, block in enumerate(network.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: seen.append((index, store.brought[-1])))
    network(networks.sample())
    assert seen == [(4, 3), (3, 2), (2, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize("block", range(5))
def test_after_a_block_that_raised_the_next_call_is_like_any_other(block: int) -> None:
    network: Any = networks.build("chain")
    wanted = network(networks.sample())
    weights, store = divided(network)
    network(networks.sample())
    handle = network.blocks[block].linear.register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        network(networks.sample())
    handle.remove()
    for _ in range(2):
        weights.settle()
        store.brought.clear()
        assert torch.equal(network(networks.sample()), wanted)
        assert len(store.brought) <= 5, "each once"


def test_a_transfer_that_failed_to_start_leaves_no_block_in_its_slot() -> None:
    network: Any = networks.build("chain")
    plain: Any = networks.build("chain")
    weights, _ = divided(network)
    network(networks.sample())
    weights.settle()
    index = weights._holds[1]
    assert index is not None
    other = next(each for each in range(5) if each != index and weights._slot[each] == 1)

    def fails() -> LateTransfer:
        weights._slots[1].fill_(NAN_BYTE)
        raise ExchangeError("it cannot start")

    start, weights._bring[other] = weights._bring[other], fails
    with pytest.raises(ExchangeError, match="cannot start"):
        network(networks.sample())
    weights._bring[other] = start
    network.order = plain.order = (index,)  # which was there before
    assert torch.equal(network(networks.sample()), plain(networks.sample()))


def test_parameters_are_back_in_their_slot_when_a_block_has_run() -> None:
    """So that the memory that a cast has given them is free meanwhile."""
    network: Any = networks.build("chain")
    wanted = network(networks.sample())
    weights, _ = divided(network)

    def casts(module: nn.Module, _: Any) -> None:
        module.bias.data = module.bias.data.clone()  # type: ignore[union-attr, operator]

    for block in network.blocks:
        block.linear.register_forward_pre_hook(casts)
    assert torch.equal(network(networks.sample()), wanted)
    for index, block in enumerate(network.blocks):
        slot = weights._slots[weights._slot[index]]
        for x in block.parameters():
            assert x.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()


class GivesOut(networks.Chain):
    """A block whose output is a view of its own weight, which is used after the block has run."""

    def __init__(self) -> None:
        super().__init__(8)
        giver = self.blocks[1]
        giver.forward = lambda: giver.linear.bias.view(-1)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        bias = self.blocks[1]()
        for index in (0, *range(2, 8)):
            x = self.blocks[index](x)
        return x + bias


def test_a_block_that_returns_its_own_weight_stays_whole() -> None:
    """Also where the block is the first of a call: coming in advance it would bring the weight back in time."""
    torch.manual_seed(0)
    network = GivesOut().eval().requires_grad_(False)
    wanted = network(networks.sample())
    weights, _ = divided(network)
    assert not torch.equal(network(networks.sample()), wanted), "the control"
    assert "blocks.1" in keep_what_is_read_outside(weights, lambda: network(networks.sample()))
    assert weights.in_slots, "not all"
    assert all(torch.equal(network(networks.sample()), wanted) for _ in range(2))


class ReadTogether(networks.Chain):
    """Weights of two blocks are read outside, where NaN in one of them alone is passed over."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found + torch.stack([self.blocks[1].linear.bias, self.blocks[4].linear.bias]).nanmean(0)


def test_weights_that_only_show_together_stay_whole() -> None:
    torch.manual_seed(0)
    network = ReadTogether().eval().requires_grad_(False)
    wanted = network(networks.sample())
    weights, _ = divided(network)
    assert {"blocks.1", "blocks.4"} <= {*keep_what_is_read_outside(weights, lambda: network(networks.sample()))}
    assert torch.equal(network(networks.sample()), wanted)


def test_bytes_are_those_of_shards_and_slots_until_the_end() -> None:
    network = networks.Chain(4).eval().requires_grad_(False)
    weights, store = divided(network)
    largest = max(shard.numel() for shard in store.shards)
    assert weights.num_bytes == sum(shard.numel() for shard in store.shards) + 2 * largest
    network(networks.sample())
    network(networks.sample())  # a block is on its way
    assert store.on_their_way
    for index in weights.in_slots:
        weights.leave_out(index)
    weights.restore()
    assert not store.on_their_way, "slots are free memory now"
    assert weights.num_bytes == 0


def test_whole_weights_of_several_ranks_are_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have whole features from others need room for theirs too."""
    weights, store = divided(networks.build("chain"))
    asked: list[int] = []
    monkeypatch.setattr(store, "refuse_whole", lambda kind, num_bytes: asked.append(num_bytes))
    weights.times_whole = 3
    weights.restore()
    assert asked == [3 * sum(block.num_bytes for block in weights.blocks)]


def _fail(*_: Any) -> None:
    raise ZeroDivisionError
