"""Exact patch parallelism: bands of a UNet's latent with this step's halo, moments, and keys and values.

The layout is DistriFusion's (Li et al., CVPR 2024, arXiv:2402.19481), whose "full sync" is not exact: its group norm
scales the variance by N/(N-1). Here moments merge exactly in fp32, and waiting is hidden where it can be: the bulk of a
convolution and attention to our own keys run while the others' values travel.

axis        patch: each rank owns a band of rows, or of columns where the picture is wider than tall
exchanged   moments with raw edge rows (one round per norm-convolution pair), halo rows, keys and values
when        this step's values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from patchpar.strategies.strategy import PatchStrategy
from patchpar.treatment import Treatment


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPatch(PatchStrategy):
    """Bands with this step's values everywhere: within rounding of one device. No options."""

    name: ClassVar[str] = "exact"

    @property
    def treatment(self) -> Treatment:
        """Everything of this step."""
        return Treatment()
