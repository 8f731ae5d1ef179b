"""Run a feature plan: every rank keeps its features of the blocks' Linears, and sums over ranks follow rows."""

from functools import partial

from torch import Tensor, nn

from patchpar.comm.all_reduce import all_reduce
from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.shard.tensor.cut import CutBlock
from patchpar.shard.tensor.feature_plan import FeatureCut, FeaturePlan
from patchpar.shard.verification import uncounted

KIND = "tensor"  # of all sums, in statistics


class FeatureSharder:
    """A transformer whose blocks are cut by a plan, until `restore`. All ranks of the axis call its methods together.

    `exchange`: "on", or "off", with which nothing is added up: wrong on purpose, a negative control.
    """

    def __init__(self, denoiser: nn.Module, plan: FeaturePlan, mesh: AxisComm) -> None:
        self.comm, self.axis = mesh
        self.exchange = "on"
        self._blocks = [
            CutBlock(denoiser.get_submodule(path), cut, self.axis.rank, partial(self._add_up, path))
            for cut in plan.blocks
            for path in cut.paths
        ]

    def _add_up(self, block: str, path: str, own: Tensor) -> Tensor:
        where = f"sum at {block}.{path}"
        return own if self.exchange == "off" else all_reduce((self.comm, self.axis), KIND, where, own)

    def restore(self) -> None:
        """Gather all weights for good, bit for bit as they were, and remove the hooks. Idempotent. Collective.

        Raises ExchangeError.
        """
        with uncounted(self.comm):
            while self._blocks:
                self._blocks[-1].restore(self._whole)
                self._blocks.pop()

    def _whole(self, cut: FeatureCut, own: Tensor, dim: int) -> Tensor:
        gather = AllGather(self.comm, self.axis, "weights", "weights cut by features")
        return cut.whole(gather.parts(own, dim, cut.sizes()), dim)
