"""Under torchrun every process has a caller of its own: how the ranks begin and end a call as one.

rank 0            the others          a rank that the plan leaves idle
random state ---> take it             takes it
generate          generate          answers every question of the others with nothing
last word   ----> end with it         ends with it
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.launch.executor import CallAborted, RankContext
from patchpar.launch.messages import encode, pack, unpack
from patchpar.pipeline.messages import CallResult, FinalState
from patchpar.pipeline.pipeline_call import random_state, take_random_state
from patchpar.pipeline.rank_stats import RankStats
from patchpar.plan.mesh import Axis, Mesh
from patchpar.shard.generators import generators_of
from patchpar.strategies.data.split import merge_outputs


class TorchrunSync:
    """One call with the arguments `kwargs`, seen from one rank."""

    def __init__(self, context: RankContext, device: torch.device, kwargs: Mapping[str, Any]) -> None:
        self._context, self._device = context, device
        self._generators = generators_of(kwargs)

    def begin(self) -> None:
        """All take the states of rank 0's generators, and of its default one."""
        states, default = self._context.ask((self._states(), random_state(self._device)))
        self._set_states(states)
        take_random_state(default, self._device)

    def end(self, output: Any, data: Axis | None, comm: Communicator | None) -> Any:
        """The whole output on rank 0, on the others one of the same class that holds nothing."""
        states = self._states()
        if data is not None and comm is not None and data.size > 1:
            output, states = self._of_all(output, data, comm)
        empty = self._hear(FinalState(emptied(output), states, random_state(self._device)))
        return output if self._context.rank == 0 else empty

    def figures(self, own: RankStats, mesh: Mesh | None, comm: Communicator | None) -> tuple[RankStats, ...]:
        """Those of every rank that takes part, in order."""
        if mesh is None or comm is None:
            return (own,)
        everyone = Axis("all", mesh.ranks.index(self._context.rank), len(mesh.ranks), mesh.ranks)
        return tuple(gather_objects(comm, everyone, own))

    def stand_by(self) -> CallResult:
        """Take part in every question, also where there is nothing to do."""
        answer = None
        while not isinstance(answer, FinalState):
            with contextlib.suppress(CallAborted):  # the callback raised: the last word follows all the same
                answer = self._context.ask(None)
        return CallResult(output=self._obey(answer), generators=())

    def release(self) -> None:
        """Let ranks that stand by go, because this call ends in an exception, on all who take part."""
        self._context.ask(FinalState(None, self._states(), random_state(self._device)))

    def _of_all(self, output: Any, data: Axis, comm: Communicator) -> tuple[Any, list[Any]]:
        """The outputs of all data ranks in one; of each generator in a list the state at the rank that drew from it."""
        found = gather_objects(comm, data, (output, self._states()))
        before = self._states_at_begin
        states = [
            next((state for state in others if not torch.equal(state, old)), old)
            for old, *others in zip(before, *(states for _, states in found), strict=True)
        ]
        return merge_outputs([output for output, _ in found]), states

    def _hear(self, word: FinalState) -> Any:
        return self._obey(self._context.ask(word))

    def _obey(self, word: FinalState) -> Any:
        self._set_states(word.generators)
        take_random_state(word.random, self._device)
        return word.output

    def _states(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators]

    def _set_states(self, states: list[Any]) -> None:
        self._states_at_begin = states
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def emptied(output: Any) -> Any:
    """An output of the same class that holds nothing: what ranks other than 0 return under torchrun."""
    if isinstance(output, tuple):
        return (None,) * len(output)
    if isinstance(output, Mapping):
        return type(output)(**dict.fromkeys(output))
    return None


def gather_objects(comm: Communicator, axis: Axis, own: Any) -> list[Any]:
    """Any picklable object from every place of `axis`, in order."""
    data = pack(encode(own))
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.transport.device)
    gather = AllGather(comm, axis, "output", "output")
    sizes = [int(size) for size in gather.same(torch.tensor([len(packed)], device=packed.device))]
    return [unpack(part.cpu().numpy().tobytes()) for part in gather.parts(packed, 0, sizes)]
