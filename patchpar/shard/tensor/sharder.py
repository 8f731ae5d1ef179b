"""Run a feature plan: every rank keeps its features of the blocks' Linears, and sums over ranks follow rows."""

from functools import partial

from torch import Tensor, nn

from patchpar.comm.all_reduce import all_reduce
from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.shard.tensor.cut import CutBlock
from patchpar.shard.tensor.feature_plan import FeatureCut, FeaturePlan
from patchpar.shard.verification import uncounted

KIND = "tensor"  # of all sums, in statistics


class WholeBlocks:
    """Where the weights of blocks are when their features are divided: here, whole and on the rank's device.

    All ranks call the methods together, in the same order.
    """

    def take(self, block: nn.Module) -> None:
        """Make a block's weights whole, before it is searched or cut."""

    def give(self, block: nn.Module) -> None:
        """Note that a block has been cut."""

    def settle(self) -> None:
        """Note that all blocks have been cut."""

    def undo(self) -> None:
        """Make the weights of cut blocks those of `give`, before the cuts are undone."""


class FeatureSharder:
    """A transformer whose blocks are cut by a plan, until `restore`. All ranks of the axis call its methods together.

    `exchange`: "on", or "off", with which nothing is added up: wrong on purpose, a negative control. `weights`: where
    those of blocks are.
    """

    def __init__(self, denoiser: nn.Module, plan: FeaturePlan, mesh: AxisComm, weights: WholeBlocks) -> None:
        self.comm, self.axis = mesh
        self.exchange, self._weights = "on", weights
        self._blocks: list[CutBlock] = []
        for cut in plan.blocks:
            for path in cut.paths:
                block = denoiser.get_submodule(path)
                weights.take(block)
                self._blocks.append(CutBlock(block, cut, self.axis.rank, partial(self._add_up, path)))
                weights.give(block)
        weights.settle()

    def _add_up(self, block: str, path: str, own: Tensor) -> Tensor:
        where = f"sum at {block}.{path}"
        return own if self.exchange == "off" else all_reduce((self.comm, self.axis), KIND, where, own)

    def restore(self) -> None:
        """Gather all weights for good, bit for bit as they were, and remove the hooks. Idempotent. Collective.

        Raises ExchangeError.
        """
        self._weights.undo()
        with uncounted(self.comm):
            while self._blocks:
                self._blocks[-1].restore(self._whole)
                self._blocks.pop()

    def _whole(self, cut: FeatureCut, own: Tensor, dim: int) -> Tensor:
        gather = AllGather(self.comm, self.axis, "weights", "weights cut by features")
        return cut.whole(gather.parts(own, dim, cut.sizes()), dim)
