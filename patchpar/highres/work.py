"""Who evaluates what: a unit is one patch of one guidance branch, and every unit takes as long as another.

    4 patches, 2 branches, 3 ranks      0u 0c | 1u 1c 2u | 2c 3u 3c

Equal units in equal runs are the shortest schedule there is; a run keeps both branches of a patch together, which then
are one call. Where runs differ, the first is the shortest: its rank also records the attention of the anchor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unit:
    """One patch or window, one branch of guidance."""

    patch: int
    branch: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One call of the denoiser: a patch with one branch, or with all of them."""

    patch: int
    branches: tuple[int, ...]


def share_out(patches: int, branches: int, ranks: int) -> list[tuple[Unit, ...]]:
    """The units of every rank, in order."""
    units = [Unit(patch, branch) for patch in range(patches) for branch in range(branches)]
    each, more = divmod(len(units), ranks)
    bounds = [rank * each + max(0, rank - (ranks - more)) for rank in range(ranks + 1)]
    return [tuple(units[start:stop]) for start, stop in pairwise(bounds)]


def merged(shares: Sequence[tuple[Unit, ...]]) -> list[tuple[Unit, ...]]:
    """The same where all branches are one: the first."""
    return [tuple(dict.fromkeys(Unit(unit.patch, 0) for unit in units)) for units in shares]


def own_of(units: tuple[Unit, ...], found: Mapping[Unit, T]) -> dict[Unit, T]:
    """What was found of these units; a rank without any evaluates another's."""
    return {unit: found[unit] for unit in units}


def evaluations_of(units: tuple[Unit, ...], branches: int) -> list[Evaluation]:
    """The calls that these units take: all branches of a patch at once, or one by one where only some are ours."""
    own: dict[int, list[int]] = {}
    for unit in units:
        own.setdefault(unit.patch, []).append(unit.branch)
    calls = []
    for patch, found in own.items():
        groups = [tuple(found)] if len(found) == branches else [(branch,) for branch in found]
        calls += [Evaluation(patch, group) for group in groups]
    return calls


def rounds_of(patches: int, branches: int, ranks: int) -> float:
    """How long a step takes, in evaluations of all branches of a patch."""
    return -(-patches * branches // ranks) / branches
