"""How a pipeline weighs its branches of guidance, found by comparing what it says with what it was told.

Guidance is a weighted sum of predictions, the same weights everywhere in a picture. What there is to know of them is a
few sums over places (`GuidanceFit`), and sums of several ranks are sums: each looks at its own places.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

APART = 0.02  # of a prediction: more than rounding explains
BALANCED = 1e-3  # weights that add up to one do so that well, whatever the rounding of single places


@dataclass(frozen=True, slots=True)
class GuidanceFit:
    """Products of the branches and of what was made of them, over places: (B, K + 1, K + 1), float64."""

    products: Tensor

    @classmethod
    def of(cls, output_BCHW: Tensor, branches_KBCHW: Tensor) -> "GuidanceFit":
        """From an output, and the predictions of all branches that it was made of."""
        known = _apart(branches_KBCHW.transpose(0, 1).flatten(2).double())
        seen = torch.cat([known, output_BCHW.flatten(1)[:, None].double()], 1)
        return cls(seen @ seen.transpose(1, 2))

    def __add__(self, other: "GuidanceFit") -> "GuidanceFit":
        return GuidanceFit(self.products + other.products)

    @property
    def weights_BK(self) -> Tensor:
        """Of each branch, for each picture."""
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
        """Whether the weights also add up to 1, as weights do that depend on no prediction.

        Of branches that are no numbers everything may be said.
        """
        if not self.products[:, :-1, :-1].isfinite().all():
            return True
        return self.is_sum and bool(((self._apart_BK[:, 0] - 1).abs() < BALANCED).all())

    @property
    def _apart_BK(self) -> Tensor:
        """Weights of the first branch and of what the others differ by."""
        known, targets = self.products[:, :-1, :-1].nan_to_num(), self.products[:, :-1, -1:]
        return (torch.linalg.pinv(known, hermitian=True, rtol=1e-10) @ targets)[:, :, 0]


def weighed(weights_BK: Tensor, branches_KBCHW: Tensor) -> Tensor:
    """Branches put together: (B, C, H, W) in float32."""
    apart = _apart(branches_KBCHW.float().transpose(0, 1).flatten(2))
    weights = torch.cat([weights_BK.sum(1, keepdim=True), weights_BK[:, 1:]], 1)
    return (weights[:, None].float() @ apart)[:, 0].reshape(branches_KBCHW.shape[1:])


def _apart(branches_BKN: Tensor) -> Tensor:
    """The first branch, and what the others differ by from it: nearly alike branches would hide their weights."""
    first = branches_BKN[:, :1]
    return torch.cat([first, branches_BKN[:, 1:] - first], 1)
