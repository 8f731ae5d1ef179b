"""Rounds of gathers for a network whose calls are made by different ranks, one guidance branch each.

    program      rank 0                      rank 1
    call 0       runs: round 1 of gathers    only noted
    call 1       only noted                  runs: the same round
    no call 1    uses its prediction         gathers without computing, when the prediction of call 0 is needed

A round gathers all blocks once, and all ranks take part in each: a rank that does not compute sends its shards all the
same. At the end of every round each rank also sends which call it has made in it. If that is refused, as all ranks that
make it do at the same block, the round ends all the same and then the call of the pipeline, on all ranks at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.errors import ExchangeError, PatchparError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.unsupported_model import in_one_line, is_of_the_split
from patchpar.shard.weights.sharded import NOT_FOLLOWED, ShardedWeights

KIND = "guidance"  # in statistics, of what ranks send each other
NO_CALL = 0


class GatherRounds:
    """The rounds of all networks whose weights are sharded over `axis`, where guidance is split within it.

    Every rank calls `own_call` or `skip_call` for each call that one rank makes, and `catch_up` while calls are
    `outstanding` before the ranks do anything else together, among them an own call that cannot join. `weights`: those
    of the network that is called; `count`: of its calls and others', the same on all ranks. `branches`: the axis of
    ranks that make calls of their own, one each in a step.
    """

    def __init__(self, comm: Communicator, axis: Axis, branches: Axis) -> None:
        self.comm, self.axis, self._branches = comm, axis, branches
        self.weights: ShardedWeights | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a pipeline call: nothing is outstanding."""
        self.count = 0
        self.outstanding: dict[int, ShardedWeights] = {}  # calls of other ranks that may wait for this one's shards
        self._ahead: set[int] = set()  # calls that other ranks have made before this one got there

    @property
    def can_join(self) -> bool:
        """Whether this network's next call can be of the round that other ranks wait in."""
        return all(weights is self.weights for weights in self.outstanding.values())

    @contextmanager
    def own_call(self) -> Iterator[None]:
        """Context in which this rank calls the network. Raises ExchangeError, UnsupportedModel.

        Other ranks raise ExchangeError where this one refuses its call. An error of the network itself becomes
        UnsupportedModel: it cannot be called without the split, to find out whose it is.
        """
        self.count += 1
        if self.weights is None:
            yield
        else:
            with self._round(self.weights, self.count):
                yield

    def skip_call(self) -> bool:
        """Note that another rank calls the network; return whether it needs nothing of this rank any more."""
        self.count += 1
        if self.weights is None:
            return True
        if self.count in self._ahead:
            return True
        self.outstanding[self.count] = self.weights
        return False

    def catch_up(self) -> None:
        """Take part in the next round of ranks that wait for this one, for which a call is outstanding.

        Raises ExchangeError.
        """
        with self._round(next(iter(self.outstanding.values())), NO_CALL):
            pass

    @contextmanager
    def _round(self, weights: ShardedWeights, call: int) -> Iterator[None]:
        try:
            with weights.round():
                yield
        except UnsupportedModel as error:
            with suppress(ExchangeError):  # of others that refuse theirs: each raises its own
                self._calls_made(call, in_one_line(error))
            raise
        except Exception as error:
            if isinstance(error, PatchparError) or not is_of_the_split(error):
                raise
            raise UnsupportedModel(
                f"{type(weights.network).__name__} fails in the call for one guidance branch ({in_one_line(error)}), "
                f"{NOT_FOLLOWED}"
            ) from error
        made = self._calls_made(call)
        self._ahead |= {number for number in made if number > self.count}
        for number in made:
            self.outstanding.pop(number, None)

    def _calls_made(self, call: int, refusal: str = "") -> set[int]:
        """Return the calls that the ranks have made in a round. Raises ExchangeError where one is refused.

        `refusal`: why this rank has not made its call; empty if it has.
        """
        number = -call if refusal else call
        own = torch.tensor([number], device=self.comm.transport.device)
        found = AllGather(self.comm, self.axis, KIND, "calls of a round").same(own)
        if own.is_meta:
            return self._calls_recorded(call)
        numbers = [int(each) for each in found]
        if min(numbers) >= NO_CALL:
            return set(numbers)
        reasons = AllGather(self.comm, self.axis, KIND, "refusals of a round").of_bytes(refusal.encode())
        group_rank, why = next((group_rank, each.decode()) for group_rank, each in enumerate(reasons) if each)
        raise ExchangeError(
            f"rank {self.axis.ranks[self.axis.rank]}: this call ends, since rank {self.axis.ranks[group_rank]} has "
            f"refused it in its own guidance branch: {why}"
        )

    def _calls_recorded(self, call: int) -> set[int]:
        """Return the calls of a round in a recording, where other ranks say nothing: those of a step of all branches.

        Without an own call they are those that are outstanding.
        """
        if call == NO_CALL:
            return set(self.outstanding)
        first = call - self._branches.rank
        return set(range(first, first + self._branches.size))
