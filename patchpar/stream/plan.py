"""Which rank does which denoising steps of a stream. Pure: no tensors, no processes.

R < S    4 steps on 2 ranks      rank 0: steps 0-1     rank 1: steps 2-3, decode
R = S    2 steps on 3 ranks      rank 0: step 0        rank 1: step 1             rank 2: decode
R > S    2 steps on 5 ranks      ranks 0-1: step 0     ranks 2-3: step 1          rank 4: decode
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole

Decode = Literal["own", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSteps:
    """One stage: its ranks, its denoising steps, and whether it decodes as well."""

    ranks: range
    steps: range
    decodes: bool

    def __str__(self) -> str:
        work = [_span("step", self.steps)] if len(self.steps) else []
        return f"{_span('rank', self.ranks)}: {', '.join(work + ['decode'] * self.decodes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """`sizes`: denoising steps of each stage, in order. Raises PlanError.

    `decode`: on a rank of its "own", or on the "last" stage. `inner`: ranks that share the work of one step.
    """

    sizes: tuple[int, ...]
    decode: Decode = "own"
    inner: int = 1

    def __post_init__(self) -> None:
        if not self.sizes or not all(map(is_whole, self.sizes)):
            raise PlanError(f"sizes={self.sizes}: there is at least one stage, and each has at least one step")
        if self.decode not in ("own", "last"):
            raise PlanError(f"decode={self.decode!r}: use 'own' or 'last'")
        if not is_whole(self.inner):
            raise PlanError(f"inner={self.inner!r}: at least 1 rank does a step")
        if self.inner > 1 and max(self.sizes) > 1:
            raise PlanError(
                f"{self.inner} ranks per stage, but stages of {max(self.sizes)} steps: give each step a stage of "
                "its own before a step gets more ranks"
            )

    @classmethod
    def even(cls, steps: int, ranks: int, *, decode: Decode | None = None) -> "StreamPlan":
        """As even as `ranks` allow, the earlier stages the larger. Raises PlanError.

        Decoding gets a rank of its own where each step has one already, or `decode` says so.
        """
        if steps < 1 or ranks < 1:
            raise PlanError(f"{steps} steps on {ranks} ranks: at least 1 of each")
        decode = decode or ("own" if ranks > steps else "last")
        left = ranks - (decode == "own")
        if left < 1:
            raise PlanError("1 rank, but decoding is to have a rank of its own: use 2 ranks, or decode='last'")
        if left > steps:
            inner, rest = divmod(left, steps)
            if rest:
                apart = ranks - left
                raise PlanError(
                    f"{ranks} ranks: {left} of them cannot be shared evenly by {steps} steps"
                    f"{', as 1 decodes' if apart else ''}; use {steps * inner + apart} or {steps * (inner + 1) + apart}"
                    f"{_by_the_way(steps, ranks, decode)}"
                )
            return cls(sizes=(1,) * steps, decode=decode, inner=inner)
        whole, extra = divmod(steps, left)
        return cls(sizes=tuple(whole + (stage < extra) for stage in range(left)), decode=decode)

    @property
    def steps(self) -> int:
        """Denoising steps of a block."""
        return sum(self.sizes)

    @property
    def ranks(self) -> int:
        """Ranks that the plan needs."""
        return len(self.sizes) * self.inner + (self.decode == "own")

    @property
    def stages(self) -> tuple[StageSteps, ...]:
        """What a block passes, in order."""
        found, step = [], 0
        for number, size in enumerate(self.sizes):
            ranks = range(number * self.inner, (number + 1) * self.inner)
            is_last = number == len(self.sizes) - 1
            found.append(
                StageSteps(ranks=ranks, steps=range(step, step + size), decodes=is_last and self.decode == "last")
            )
            step += size
        if self.decode == "own":
            own = range(self.ranks - 1, self.ranks)
            found.append(StageSteps(ranks=own, steps=range(step, step), decodes=True))
        return tuple(found)

    @property
    def depth(self) -> int:
        """Blocks that are under way at once when every stage is busy."""
        return len(self.stages)

    @property
    def decoder(self) -> int:
        """The rank that decodes."""
        return self.stages[-1].ranks[0]

    def stage_of(self, rank: int) -> int:
        """The number of the stage that a rank belongs to. Raises PlanError."""
        for number, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return number
        raise PlanError(f"rank {rank} has no part in this plan: it has ranks 0 to {self.ranks - 1}")

    def __str__(self) -> str:
        return f"{self.steps} steps on {self.ranks} ranks ({'; '.join(map(str, self.stages))})"


def plans(steps: int, ranks: int) -> Iterator[StreamPlan]:
    """Every plan for at most `ranks` ranks, with one rank per stage or evenly several."""
    for decode in ("last", "own"):
        left = ranks - (decode == "own")
        for stages in range(1, min(steps, left) + 1):
            for cuts in combinations(range(1, steps), stages - 1):
                ends = (0, *cuts, steps)
                sizes = tuple(b - a for a, b in pairwise(ends))
                yield StreamPlan(sizes=sizes, decode=decode)
        for inner in range(2, left // steps + 1):
            yield StreamPlan(sizes=(1,) * steps, decode=decode, inner=inner)


def _by_the_way(steps: int, ranks: int, decode: Decode) -> str:
    """The way to use exactly `ranks` ranks, where there is one."""
    if decode == "own" and ranks % steps == 0:
        return ", or decode='last'"
    return ", or decode='own'" if decode == "last" and ranks > 1 and (ranks - 1) % steps == 0 else ""


def _span(what: str, numbers: range) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {numbers[0]}-{numbers[-1]}"
