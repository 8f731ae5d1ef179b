"""Weights divided twice: by features between the ranks of axis `tensor`, and each rank's features in shards or hosted.

loaded            blocks in shards of all ranks of the image
the first call    one after the other is gathered, cut to this rank's features, and these wait in host memory
from then on      features in shards of the ranks that hold the same ones, or in host memory
"""

from collections.abc import Callable

import torch
from torch import nn

from patchpar.shard.tensor.sharder import WholeBlocks
from patchpar.shard.weights.packed import HOST
from patchpar.shard.weights.sharded import ShardedWeights


class DividedFeatures(WholeBlocks):
    """The blocks of one network. `held`: its weights in shards of all ranks of the image, if they are, until `settle`.

    `divide`: returns those of this rank's features in shards, from weights of which some are in host memory.
    """

    def __init__(self, held: ShardedWeights | None, divide: Callable[[], ShardedWeights]) -> None:
        self.held, self.divide = held, divide
        self.weights: ShardedWeights | None = None

    def take(self, block: nn.Module) -> None:
        """See WholeBlocks."""
        if self.held is not None:
            for index in [each for each in self.held.in_slots if self.held.blocks[each].module is block]:
                self.held.keep_whole(index)

    def give(self, block: nn.Module) -> None:
        """See WholeBlocks."""
        if self.held is not None:
            move(block, HOST)

    def settle(self) -> None:
        """See WholeBlocks. Raises UnsupportedModel, PlanError."""
        held, self.held = self.held, None
        if held is not None:
            held.settle()
            for index in held.in_slots:
                held.keep_whole(index)
                move(held.blocks[index].module, HOST)
            held.restore()
        self.weights = self.divide()

    def undo(self) -> None:
        """See WholeBlocks. Raises PlanError where whole weights do not fit."""
        if self.weights is not None:
            self.weights.restore()
            self.weights = None


def move(network: nn.Module, device: torch.device) -> None:
    """Move all weights of a network that are on the host to a device, or the other way round."""
    with torch.inference_mode(mode=False):
        for x in (*network.parameters(), *network.buffers()):
            if x.device != device:
                x.data = x.data.to(device)
