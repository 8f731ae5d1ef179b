"""The neighbours of one rank in a plan."""

from dataclasses import dataclass

from patchpar.stream.plan import StageSteps, StreamPlan


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
    makes_first: bool

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
            makes_first=leads and bool(stage.steps) and stage.steps[-1] == plan.steps - 1,
        )

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the stage."""
        return len(self.stage.ranks) > 1

    @property
    def decodes(self) -> bool:
        """Whether this rank decodes."""
        return self.leads and self.stage.decodes
