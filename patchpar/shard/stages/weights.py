"""The weights of blocks that other stages run: NaN here, while released, and sent back bit for bit by their holders."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Incoming, Outgoing, TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.shard.verification import uncounted
from patchpar.shard.weights.left_whole import say_what_stays_whole
from patchpar.shard.weights.packed import PackedBlock, blocks_of, packed_blocks
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.shard.weights.stores import refuse_whole

KIND = "weights"
Holders = Mapping[str, frozenset[int]]  # stages that run a block, by its path


def borrowed_blocks(network: nn.Module, others: Iterable[object]) -> frozenset[str]:
    """Return the paths of blocks that one of the other objects, if it is a network, has as well, or a part of them."""
    networks = [each for each in others if isinstance(each, nn.Module) and each is not network]
    theirs = {module for each in networks for module in each.modules()}
    return frozenset(path for path, block in blocks_of(network).items() if not theirs.isdisjoint(block.modules()))


class StageWeights:
    """The weights of one network, of which each rank of `axis` may release those of blocks that it does not run.

    All ranks of the axis call `release` and `gather` together. Weights that two blocks have in common stay. Raises
    UnsupportedModel where weights are not on the rank's device.
    """

    def __init__(self, network: nn.Module, comm: Communicator, axis: Axis) -> None:
        self._comm, self._axis, self._kind = comm, axis, type(network).__name__
        self._blocks = packed_blocks(network, comm.transport.device)
        say_what_stays_whole(network, [block.module for block in self._blocks], axis)
        self.holders: Holders = {}  # of released blocks

    def release(self, holders: Holders) -> None:
        """Free the weights of blocks that this stage does not run."""
        self.holders = holders
        for block in self._blocks_without(self._axis.rank, holders):
            block.point_to(block.nan_views())

    def gather(self) -> None:
        """Get all weights back from the stages that hold them.

        Raises PlanError, with nothing changed, where they do not fit a device. Raises ExchangeError; what is missing
        then is known, and is sent again at the next call.
        """
        if not self.holders:
            return
        missing = self._blocks_without(self._axis.rank, self.holders)
        refuse_whole((self._comm, self._axis), self._kind, sum(block.num_bytes for block in missing))
        with uncounted(self._comm), torch.inference_mode(mode=False):
            for block in self._blocks:
                holders = self.holders.get(block.name)
                if holders is not None and len(holders) < self._axis.size:
                    self._spread(block, holders)
        self.holders = {}

    def _spread(self, block: PackedBlock, holders: frozenset[int]) -> None:
        axis, owner = self._axis, min(holders)
        missing = [rank for rank in range(axis.size) if rank not in holders]
        where = f"weights of {block.name}"
        if axis.rank == owner:
            buffer = torch.empty(block.num_bytes, dtype=torch.uint8, device=self._comm.transport.device)
            block.write(buffer)
            peers = tuple(axis.ranks[rank] for rank in missing)
            self._comm.send_recv(KIND, where, [Outgoing(peers, (buffer,))], []).wait()
        elif axis.rank in missing:
            expected = Incoming(axis.ranks[owner], (TensorSpec((block.num_bytes,), torch.uint8),))
            ((received,),) = self._comm.send_recv(KIND, where, [], [expected]).wait()
            block.point_to(block.own_copies(block.views(received)))

    @contextmanager
    def set_aside(self, holders: Holders) -> Iterator[None]:
        """Context in which blocks that this stage does not run have no weights, as after `release`; nothing is sent."""
        aside = self._blocks_without(self._axis.rank, holders)
        kept = [[each.tensor.data for each in block.tensors] for block in aside]
        try:
            for block in aside:
                block.point_to(block.nan_views())
            yield
        finally:
            for block, tensors in zip(aside, kept, strict=True):
                block.point_to(tensors)

    def _blocks_without(self, stage: int, holders: Holders) -> list[PackedBlock]:
        return [block for block in self._blocks if stage not in holders.get(block.name, {stage})]


class HostedStageWeights:
    """The same of `weights` that are hosted: what a rank does not hold comes from host memory, and no rank sends any.

    Gathered, every block comes into a slot when it runs, so that the whole network fits; released, own blocks are on
    the device.
    """

    def __init__(self, weights: ShardedWeights, axis: Axis) -> None:
        self._weights, self._axis = weights, axis
        self._moved: list[int] = []  # blocks that are not in slots, and were
        self.holders: Holders = {}  # of released blocks

    def release(self, holders: Holders) -> None:
        """Bring the blocks of this stage to the device, and leave out the others."""
        self._weights.settle()
        for index in self._weights.in_slots:
            if self._is_here(index, holders):
                self._weights.keep_whole(index)
            else:
                self._weights.leave_out(index)
            self._moved.append(index)
        self.holders = holders

    def gather(self) -> None:
        """Bring all blocks into slots when they run."""
        self.holders, moved, self._moved = {}, self._moved, []
        for index in moved:
            self._weights.into_slot(index)

    @contextmanager
    def set_aside(self, holders: Holders) -> Iterator[None]:
        """Context in which blocks that this stage does not run have no weights."""
        self._weights.settle()
        aside = [index for index in self._weights.in_slots if not self._is_here(index, holders)]
        try:
            for index in aside:
                self._weights.leave_out(index)
            yield
        finally:
            for index in aside:
                self._weights.into_slot(index)

    def _is_here(self, index: int, holders: Holders) -> bool:
        return self._axis.rank in holders.get(self._weights.blocks[index].name, {self._axis.rank})
