"""How the block calls of one pass of a network are divided between stages."""

from dataclasses import dataclass

from patchpar.comm.transport import TensorSpec
from patchpar.shard.stages.block_outputs import OutputStructure

Given = tuple[TensorSpec | int, ...]
"""The tensors that a block is given; of a patch also the numbers of tokens of all patches."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of the block at `path`: what it is given, the form of its output, and its work in any unit."""

    path: str
    given: Given
    form: OutputStructure
    cost: float


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Block calls 0 to `first` - 1 run on every stage, the others on one, cut into runs at `cuts`.

    `carried`: for each cut the numbers of earlier calls whose outputs are needed after it, ascending. `output`: the
    form of what the network returns.
    """

    calls: tuple[RecordedCall, ...]
    first: int
    cuts: tuple[int, ...]
    carried: tuple[tuple[int, ...], ...]
    output: OutputStructure

    @property
    def given(self) -> tuple[Given, ...]:
        """What blocks are given that only one stage runs, each once."""
        return tuple(dict.fromkeys(call.given for call in self.calls[self.first :]))

    def is_between_messages(self, number: int) -> bool:
        """Whether at this call each message between stages has arrived, or is not yet waited for."""
        return all(cut <= number or min(calls) >= number for cut, calls in zip(self.cuts, self.carried, strict=True))

    def begins_as(self, other: "StageLayout") -> bool:
        """Whether calls of the two, with the same cuts, send the same until they differ in what a block is given."""
        pairs = enumerate(zip(self.calls, other.calls, strict=True))
        differs = next((number for number, (own, its) in pairs if own.given != its.given), len(self.calls))
        before = sum(cut <= differs for cut in self.cuts)
        return self.carried[:before] == other.carried[:before] and self.is_between_messages(differs)

    @property
    def paths(self) -> list[str]:
        """The blocks in the order of their calls."""
        return [call.path for call in self.calls]

    def own_calls(self, stage: int) -> range:
        """Return the numbers of the calls that only this stage runs."""
        ends = (self.first, *self.cuts, len(self.calls))
        return range(ends[stage], ends[stage + 1])

    def carried_into(self, stage: int) -> tuple[int, ...]:
        """Return the calls whose outputs a stage receives."""
        return self.carried[stage - 1] if stage else ()

    def carried_out(self, stage: int) -> tuple[int, ...]:
        """Return the calls whose outputs a stage sends to the next one."""
        return self.carried[stage] if stage < len(self.carried) else ()

    def holders(self) -> dict[str, frozenset[int]]:
        """Return the stages that run each block, by its path."""
        found: dict[str, frozenset[int]] = {}
        everywhere = frozenset(range(len(self.cuts) + 1))
        for call in self.calls[: self.first]:
            found[call.path] = everywhere
        for stage in everywhere:
            for number in self.own_calls(stage):
                path = self.calls[number].path
                found[path] = found.get(path, frozenset()) | {stage}
        return found

    def __str__(self) -> str:
        """Return the blocks of each stage, for logs."""
        runs = [self.own_calls(stage) for stage in range(len(self.cuts) + 1)]
        return "; ".join(f"{self.calls[run[0]].path} to {self.calls[run[-1]].path}" for run in runs)
