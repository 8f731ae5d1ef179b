"""Moments of groups: merging those of several ranks, and estimating today's from stale ones.

Shape letters: B batch, G groups, P ranks. Packed moments [1 + 2 * B * G] are the number of values per group, the means,
and the sums of squared deviations, in fp32 or fp64.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of each group, in fp32 or fp64. They merge exactly."""

    num: Tensor  # [1], values per group
    mean_BG: Tensor
    m2_BG: Tensor


def unpack_moments(packed: Tensor, shape: tuple[int, int]) -> Moments:
    """Return the moments packed in [1 + 2 * B * G]; `shape` is (B, G)."""
    mean_BG, m2_BG = packed.narrow(0, 1, packed.shape[0] - 1).view(2, *shape).unbind(0)
    return Moments(packed.narrow(0, 0, 1), mean_BG, m2_BG)


def merge_moments(packed_PN: Tensor, shape: tuple[int, int]) -> Moments:
    """Merge the packed moments [P, 1 + 2 * B * G] of all bands; `shape` is (B, G).

    Exact for any counts and means (Chan, Golub, LeVeque 1979).
    """
    size = packed_PN.shape[1]
    count_P11 = packed_PN.narrow(1, 0, 1).unsqueeze(-1)
    mean_PBG, m2_PBG = packed_PN.narrow(1, 1, size - 1).reshape(-1, 2, *shape).unbind(1)
    count = count_P11.sum()
    mean_BG = (mean_PBG * (count_P11 / count)).sum(0)
    m2_BG = (m2_PBG + count_P11 * (mean_PBG - mean_BG).square()).sum(0)
    return Moments(count, mean_BG, m2_BG)


def correct_moments(whole: Moments, own: Moments, now: Moments, least: float = 0.0) -> Moments:
    """Return the stale moments of the whole, plus the change of this rank's own since.

    DistriFusion's corrected asynchronous group norm (arXiv:2402.19481, section 4): mean' = mean + (own now - own), and
    the same for E[x^2], so var' = E'[x^2] - mean'^2, and the rank's own variance where that is below `least` times it:
    0 in the paper. Written out, the squares of the means cancel, which keeps fp32 exact enough where means are large.
    The variance is biased, as in nn.GroupNorm.
    """
    moved_BG = now.mean_BG - own.mean_BG
    var_BG, own_var_BG, now_var_BG = (moments.m2_BG / moments.num for moments in (whole, own, now))
    corrected_BG = var_BG + (now_var_BG - own_var_BG) + 2 * moved_BG * (own.mean_BG - whole.mean_BG)
    corrected_BG = torch.where(corrected_BG < least * now_var_BG, now_var_BG, corrected_BG)
    return Moments(whole.num, whole.mean_BG + moved_BG, corrected_BG * whole.num)


def as_published(moments: Moments, num_own: Tensor) -> Moments:
    """Return the moments with the variance times N/(N - 1), N = `num_own` [1] values per group of this rank's band.

    DistriFusion's code does so; its paper (arXiv:2402.19481) does not mention it, and nn.GroupNorm is biased.
    """
    return moments._replace(m2_BG=moments.m2_BG * (num_own / (num_own - 1).clamp_min(1)))
