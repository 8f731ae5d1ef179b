"""Assignment of denoising steps to the ranks of a stream. No tensors, no processes.

R < S    4 steps on 2 ranks      rank 0: steps 0-1     rank 1: steps 2-3, decode
R = S    2 steps on 3 ranks      rank 0: step 0        rank 1: step 1             rank 2: decode
R > S    2 steps on 5 ranks      ranks 0-1: step 0     ranks 2-3: step 1          rank 4: decode
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Literal

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole

Decode = Literal["own", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSteps:
    """One stage: its ranks, its denoising steps, and whether it also decodes."""

    ranks: range
    steps: range
    decodes: bool

    def __str__(self) -> str:
        work = [_span("step", self.steps)] if len(self.steps) else []
        return f"{_span('rank', self.ranks)}: {', '.join(work + ['decode'] * self.decodes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """`sizes`: steps by stage. `decode`: on its "own" rank or the "last". `inner`: ranks per step. Raises PlanError."""

    sizes: tuple[int, ...]
    decode: Decode = "own"
    inner: int = 1

    def __post_init__(self) -> None:
        if not self.sizes or not all(map(is_whole, self.sizes)):
            raise PlanError(f"sizes={self.sizes}: use at least one stage, with at least one step each")
        if self.decode not in ("own", "last"):
            raise PlanError(f"decode={self.decode!r}: use 'own' or 'last'")
        if not is_whole(self.inner):
            raise PlanError(f"inner={self.inner!r}: it must be a whole number of at least 1")
        if self.inner > 1 and max(self.sizes) > 1:
            raise PlanError(
                f"inner={self.inner}, but a stage has {max(self.sizes)} steps: use inner=1, or one step per stage"
            )

    @classmethod
    def even(cls, steps: int, ranks: int, *, decode: Decode | None = None) -> "StreamPlan":
        """Return a plan with steps as evenly on `ranks` ranks as possible, larger stages first. Raises PlanError.

        By default decoding has its own rank if there are more ranks than steps.
        """
        if not is_whole(steps) or not is_whole(ranks):
            raise PlanError(f"{steps!r} steps on {ranks!r} ranks: use at least 1 of each")
        decode = decode or ("own" if ranks > steps else "last")
        left = ranks - (decode == "own")
        if left < 1:
            raise PlanError("1 rank with decode='own': use at least 2 ranks, or decode='last'")
        if left > steps:
            inner, rest = divmod(left, steps)
            if rest:
                apart = ranks - left
                raise PlanError(
                    f"{ranks} ranks: {left} of them cannot be divided evenly among {steps} steps"
                    f"{', as 1 decodes' if apart else ''}; use {steps * inner + apart} or {steps * (inner + 1) + apart}"
                    f"{_by_the_way(steps, ranks, decode)}"
                )
            return cls(sizes=(1,) * steps, decode=decode, inner=inner)
        whole, extra = divmod(steps, left)
        return cls(sizes=tuple(whole + (stage < extra) for stage in range(left)), decode=decode)

    @classmethod
    def on_devices(cls, steps: int, devices: int, *, inner: int = 1) -> "StreamPlan":
        """Return the plan that a stream has on so many devices, of which it may leave some. Raises PlanError.

        Steps and decoding have a rank each, as far as there are devices; each step has `inner` ranks.
        """
        if inner == 1:
            return cls.even(steps, min(devices, steps + 1))
        if is_whole(inner) and devices < steps * inner:
            needed = f"each step needs {inner} devices, {steps * inner} in all"
            raise PlanError(f"inner={inner}: for this {needed}, and there are {devices}")
        return cls(sizes=(1,) * steps, decode="own" if devices > steps * inner else "last", inner=inner)

    @property
    def steps(self) -> int:
        """Denoising steps of a block."""
        return sum(self.sizes)

    @property
    def ranks(self) -> int:
        return len(self.sizes) * self.inner + (self.decode == "own")

    @property
    def stages(self) -> tuple[StageSteps, ...]:
        """The stages that a block passes, in order."""
        found = []
        for number, (start, stop) in enumerate(pairwise(accumulate(self.sizes, initial=0))):
            ranks = range(number * self.inner, (number + 1) * self.inner)
            decodes = self.decode == "last" and stop == self.steps
            found.append(StageSteps(ranks=ranks, steps=range(start, stop), decodes=decodes))
        if self.decode == "own":
            own = range(self.ranks - 1, self.ranks)
            found.append(StageSteps(ranks=own, steps=range(self.steps, self.steps), decodes=True))
        return tuple(found)

    @property
    def depth(self) -> int:
        """Blocks in flight when every stage is busy."""
        return len(self.stages)

    @property
    def decoder(self) -> int:
        return self.stages[-1].ranks[0]

    @property
    def finisher(self) -> int:
        """The rank that ends the last denoising step of a block."""
        return self.stages[len(self.sizes) - 1].ranks[0]

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Pairs of ranks of which the first sends each block to the second."""
        sources = [(StagePosition.of(self, rank).source, rank) for rank in range(self.ranks)]
        return tuple((source, rank) for source, rank in sources if source is not None)

    def stage_of(self, rank: int) -> int:
        """Return the number of the stage of a rank. Raises PlanError."""
        for number, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return number
        raise PlanError(f"rank {rank} is not in this plan: it has ranks 0 to {self.ranks - 1}")

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{steps} on {ranks} ({'; '.join(map(str, self.stages))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePosition:
    """A rank's part in a plan. `source`, `next`: ranks that it gets blocks from, and sends them on to; None if none.

    `peers`: ranks that the first rank of a shared stage, which `leads`, forwards them to.
    """

    stage: StageSteps
    number: int
    leads: bool
    source: int | None
    peers: tuple[int, ...]
    next: int | None

    @classmethod
    def of(cls, plan: StreamPlan, rank: int) -> "StagePosition":
        """Return the position of `rank` in `plan`. Raises PlanError."""
        stages, number = plan.stages, plan.stage_of(rank)
        stage = stages[number]
        leader, *peers = stage.ranks
        leads = rank == leader
        before = stages[number - 1].ranks[0] if number else None
        has_next = leads and number + 1 < len(stages)
        return cls(
            stage=stage,
            number=number,
            leads=leads,
            source=before if leads else leader,
            peers=tuple(peers) if leads else (),
            next=stages[number + 1].ranks[0] if has_next else None,
        )

    @property
    def is_shared(self) -> bool:
        return len(self.stage.ranks) > 1

    @property
    def decodes(self) -> bool:
        return self.leads and self.stage.decodes


def plans(steps: int, ranks: int) -> Iterator[StreamPlan]:
    """Yield every plan for at most `ranks` ranks, with one rank per stage, or as many for each step."""
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
    """A hint how to use exactly `ranks` ranks, if another `decode` allows it."""
    if decode == "own" and ranks % steps == 0:
        return ", or decode='last'"
    return ", or decode='own'" if decode == "last" and ranks > 1 and (ranks - 1) % steps == 0 else ""


def _span(what: str, numbers: range) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {numbers[0]}-{numbers[-1]}"
