"""Run a feature plan: every rank keeps its features of the blocks' Linears, and sums over ranks follow rows."""

from functools import partial

from torch import Tensor, nn

from patchpar.comm.all_reduce import all_reduce
from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.shard.tensor.cut import CutBlock
from patchpar.shard.tensor.feature_plan import BlockCut, FeatureCut, FeaturePlan
from patchpar.shard.verification import every_rank_has, uncounted
from patchpar.shard.weights.stores import refuse_whole

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
    those of blocks are. `together`: all ranks that cut theirs at the same time; those of the axis where it is None. A
    cut that fails on one of them is undone on all. Raises UnsupportedModel, PlanError, ExchangeError, and on the rank
    where a cut fails what that raises.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        plan: FeaturePlan,
        mesh: AxisComm,
        weights: WholeBlocks,
        together: AxisComm | None = None,
    ) -> None:
        self.together, (self.comm, self.axis) = together or mesh, mesh
        self.denoiser, self.exchange, self._weights = denoiser, "on", weights
        self._blocks: list[CutBlock] = []
        for cut in plan.blocks:
            for path in cut.paths:
                self._cut(path, cut)
        try:
            weights.settle()
        except PlanError:  # of all ranks
            self.restore()
            raise

    def _cut(self, path: str, cut: BlockCut) -> None:
        block, part, failure = self.denoiser.get_submodule(path), None, None
        self._weights.take(block)
        try:
            part = CutBlock(block, cut, self.axis.rank, partial(self._add_up, path))
        except Exception as error:  # noqa: BLE001  raised below
            failure = error
        if every_rank_has(self.together, f"features of {path}", part is not None) and part is not None:
            part.settle()
            self._blocks.append(part)
            self._weights.give(block)
            return
        if part is not None:
            part.undo()
        self.restore()
        raise failure or UnsupportedModel(f"another rank cannot divide {path} by features, so that none does")

    def _add_up(self, block: str, path: str, own: Tensor) -> Tensor:
        where = f"sum at {block}.{path}"
        return own if self.exchange == "off" else all_reduce((self.comm, self.axis), KIND, where, own)

    def restore(self) -> None:
        """Gather all weights for good, bit for bit as they were, and remove the hooks. Idempotent. Collective.

        Raises PlanError, with every block as it was, where whole weights do not fit a device. Raises ExchangeError.
        """
        self._weights.undo()
        if self._blocks:
            need = sum(block.missing_bytes() for block in self._blocks)
            refuse_whole(self.together, type(self.denoiser).__name__, need)
        with uncounted(self.comm):
            while self._blocks:
                self._blocks[-1].restore(self._whole)
                self._blocks.pop()

    def _whole(self, cut: FeatureCut, own: Tensor, dim: int) -> Tensor:
        gather = AllGather(self.comm, self.axis, "weights", "weights cut by features")
        own = own.to(self.comm.transport.device)  # which may wait on the host
        return cut.whole(gather.parts(own, dim, cut.sizes()), dim)
