"""The weights of a pipeline's guidance branches, fitted to its combined prediction by least squares.

Guidance is a weighted sum of predictions with the same weights everywhere in an image. The fit needs only a few sums
over positions (`GuidanceFit`), which add up over ranks: each rank sums over its own positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

APART = 0.02  # of a prediction: more than rounding explains
BALANCED = 1e-3  # how far rounding moves the sum of weights that add up to one


@dataclass(frozen=True, slots=True)
class GuidanceFit:
    """Products of the K branches and the combined prediction, summed over positions: [B, K + 1, K + 1], float64."""

    products: Tensor

    @classmethod
    def of(cls, output_BCHW: Tensor, branches_KBCHW: Tensor) -> "GuidanceFit":
        """Return the fit of a combined prediction to the predictions of all branches."""
        known = _apart(branches_KBCHW.transpose(0, 1).flatten(2).double())
        seen = torch.cat([known, output_BCHW.flatten(1)[:, None].double()], 1)
        return cls(seen @ seen.transpose(1, 2))

    def __add__(self, other: "GuidanceFit") -> "GuidanceFit":
        return GuidanceFit(self.products + other.products)

    @property
    def weights_BK(self) -> Tensor:
        """Return the weight of each branch for each image, weights_BK."""
        apart = self._apart_BK
        return torch.cat([apart[:, :1] - apart[:, 1:].sum(1, keepdim=True), apart[:, 1:]], 1)

    @property
    def is_sum(self) -> bool:
        """Whether the output is a weighted sum of the branches."""
        known, targets, wanted = self.products[:, :-1, :-1], self.products[:, :-1, -1:], self.products[:, -1, -1]
        found = self._apart_BK[:, :, None]
        left = wanted + (found.transpose(1, 2) @ (known @ found - 2 * targets))[:, 0, 0]
        return bool(left.sum() <= APART**2 * wanted.sum())

    @property
    def is_mean(self) -> bool:
        """Whether the weights add up to 1, as those do that depend on no prediction. True for non-finite branches."""
        if not self.products[:, :-1, :-1].isfinite().all():
            return True
        return self.is_sum and bool(((self._apart_BK[:, 0] - 1).abs() < BALANCED).all())

    @property
    def _apart_BK(self) -> Tensor:
        """Return the weights of the first branch and of the differences of the others from it."""
        known, targets = self.products[:, :-1, :-1].nan_to_num(), self.products[:, :-1, -1:]
        return (torch.linalg.pinv(known, hermitian=True, rtol=1e-10) @ targets)[:, :, 0]


def weighed(weights_BK: Tensor, branches_KBCHW: Tensor) -> Tensor:
    """Return the weighted sum of the branches: [B, C, H, W] in float32."""
    apart = _apart(branches_KBCHW.float().transpose(0, 1).flatten(2))
    weights = torch.cat([weights_BK.sum(1, keepdim=True), weights_BK[:, 1:]], 1)
    return (weights[:, None].float() @ apart)[:, 0].reshape(branches_KBCHW.shape[1:])


def _apart(branches_BKN: Tensor) -> Tensor:
    """Return the first branch and the differences of the others from it, which conditions the fit better."""
    first = branches_BKN[:, :1]
    return torch.cat([first, branches_BKN[:, 1:] - first], 1)
