"""Assignment of units to ranks: a unit is one patch of one guidance branch, and all units cost the same.

    4 patches, 2 branches, 3 ranks      0u 0c | 1u 1c 2u | 2c 3u 3c

Contiguous runs of equal length are optimal for whole units, and keep both branches of a patch in one call. Where runs
differ in length the first is the shortest: its rank also records the attention of the anchor.

Splitting units makes a step shorter: units left over after an equal assignment are computed by teams of neighbouring
ranks, in bands.

    5 patches, 2 branches, 4 ranks      0u 0c | 1u 1c | 2u 2c | 3u 3c
    in teams of two                     ---- 4u ---- | ---- 4c ----
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unit:
    """One patch or window of one guidance branch."""

    patch: int
    branch: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One call of the denoiser: a patch with one branch, or with all of them."""

    patch: int
    branches: tuple[int, ...]


def assign_units(patches: int, branches: int, ranks: int) -> list[tuple[Unit, ...]]:
    """Return the units of every rank, in order."""
    units = [Unit(patch, branch) for patch in range(patches) for branch in range(branches)]
    each, more = divmod(len(units), ranks)
    bounds = [rank * each + max(0, rank - (ranks - more)) for rank in range(ranks + 1)]
    return [tuple(units[start:stop]) for start, stop in pairwise(bounds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The units that every rank of an axis evaluates in a step.

    `whole_units`: by rank, those it computes alone. `split_units`: by rank, those its team computes in bands.
    `assignment`: by rank, those it contributes to the whole; each unit of a team belongs to one member.
    """

    whole_units: tuple[tuple[Unit, ...], ...]
    split_units: tuple[tuple[Unit, ...], ...]
    assignment: tuple[tuple[Unit, ...], ...]

    def without(self, patch: int) -> "Schedule":
        """Return the schedule without one patch; all other units stay on their ranks."""
        whole_units, split_units, assignment = (
            tuple(tuple(unit for unit in units if unit.patch != patch) for units in each)
            for each in (self.whole_units, self.split_units, self.assignment)
        )
        return Schedule(whole_units=whole_units, split_units=split_units, assignment=assignment)


def scheduled(patches: int, branches: int, ranks: int, bands: int = 1) -> Schedule:
    """Return the shortest schedule. `bands`: the size of a team, a divisor of `ranks`; 1 for no teams.

    Teams are used where their part takes at most half of a unit's time; otherwise whole units are as fast.
    """
    plain = tuple(assign_units(patches, branches, ranks))
    each, left = divmod(patches * branches, ranks)
    teams = ranks // bands
    if not left or bands == 1 or 2 * -(-left // teams) > bands:
        return Schedule(whole_units=plain, split_units=((),) * ranks, assignment=plain)
    units = [Unit(patch, branch) for patch in range(patches) for branch in range(branches)]
    whole_units = tuple(tuple(units[rank * each : (rank + 1) * each]) for rank in range(ranks))
    rest = units[ranks * each :]
    jobs = [tuple(rest[team * left // teams : (team + 1) * left // teams]) for team in range(teams)]
    split_units = tuple(jobs[rank // bands] for rank in range(ranks))
    assignment = tuple(own + split_units[rank][rank % bands :: bands] for rank, own in enumerate(whole_units))
    return Schedule(whole_units=whole_units, split_units=split_units, assignment=assignment)


def merged(assignment: Sequence[tuple[Unit, ...]]) -> list[tuple[Unit, ...]]:
    """Return the assignment with all branches merged into the first."""
    return [tuple(dict.fromkeys(Unit(unit.patch, 0) for unit in units)) for units in assignment]


def own_of(units: tuple[Unit, ...], found: Mapping[Unit, T]) -> dict[Unit, T]:
    """Return the entries of these units: a rank without units has evaluated one of another rank."""
    return {unit: found[unit] for unit in units}


def evaluations_of(units: tuple[Unit, ...], branches: int) -> list[Evaluation]:
    """Return the denoiser calls for these units: one for all branches of a patch, else one per branch."""
    own: dict[int, list[int]] = {}
    for unit in units:
        own.setdefault(unit.patch, []).append(unit.branch)
    calls = []
    for patch, found in own.items():
        groups = [tuple(found)] if len(found) == branches else [(branch,) for branch in found]
        calls += [Evaluation(patch, group) for group in groups]
    return calls
