"""Synchronise the start and the end of a call under torchrun, where every process has its own caller.

rank 0            other ranks       a rank that the plan does not use
random state ---> set it            sets it
generate          generate          takes part in every `ask`
FinalState -----> set it            sets it
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.launch.executor import CallAborted, IdleRank, RankContext
from patchpar.launch.messages import encode, pack, unpack
from patchpar.pipeline.messages import CallResult, FinalState
from patchpar.pipeline.rank_random import random_state, take_random_state
from patchpar.pipeline.rank_stats import RankStats
from patchpar.plan.mesh import Axis, Mesh
from patchpar.shard.generators import generators_of
from patchpar.strategies.data.split import merge_outputs


class TorchrunSync:
    """One rank's part in a call with the arguments `kwargs` and `args`."""

    def __init__(
        self, context: RankContext, device: torch.device, kwargs: Mapping[str, Any], args: Sequence[Any] = ()
    ) -> None:
        self._context, self._device = context, device
        self._generators = generators_of(kwargs, args)

    def begin(self) -> None:
        """Set all generators, also the default ones, to rank 0's states. Collective."""
        states, default = self._context.ask((self._states(), random_state(self._device)))
        self._set_states(states)
        take_random_state(default, self._device)

    def end(self, output: Any, data: Axis | None, comm: Communicator | None) -> Any:
        """Return the whole output on rank 0, on other ranks an empty one of the same class. Collective."""
        states = self._states()
        if data is not None and comm is not None and data.size > 1:
            output, states = self._of_all(output, data, comm)
        empty = self._apply(self._context.ask(FinalState(emptied(output), states, random_state(self._device))))
        return output if self._context.rank == 0 else empty

    def figures(self, own: RankStats, mesh: Mesh | None, comm: Communicator | None) -> tuple[RankStats, ...]:
        """Return the statistics of all participating ranks in order. Collective."""
        if mesh is None or comm is None:
            return (own,)
        return tuple(gather_objects(comm, mesh.of_all(), own))

    def stand_by(self) -> CallResult | IdleRank:
        """Take part in every `ask` of the other ranks until the FinalState; return its output, IdleRank if they failed.

        This rank has then reached fewer exchange points than they have, and no message is left between them.
        """
        answer = None
        while not isinstance(answer, FinalState):
            with contextlib.suppress(CallAborted):  # the callback raised: a FinalState follows all the same
                answer = self._context.ask(None)
        output = self._apply(answer)
        return IdleRank() if answer.failed else CallResult(output=output, generators=())

    def release(self) -> None:
        """End `stand_by` on idle ranks, because this call ends with an exception on all participating ranks."""
        self._context.ask(FinalState(None, self._states(), random_state(self._device), failed=True))

    def _of_all(self, output: Any, data: Axis, comm: Communicator) -> tuple[Any, list[Any]]:
        """Return the merged output of all data ranks, and each generator's state from the rank that used it."""
        found = gather_objects(comm, data, (output, self._states()))
        before = self._states_at_begin
        states = [
            next((state for state in others if not torch.equal(state, old)), old)
            for old, *others in zip(before, *(states for _, states in found), strict=True)
        ]
        return merge_outputs([output for output, _ in found]), states

    def _apply(self, final: FinalState) -> Any:
        self._set_states(final.generators)
        take_random_state(final.random, self._device)
        return final.output

    def _states(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators]

    def _set_states(self, states: list[Any]) -> None:
        self._states_at_begin = states
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def emptied(output: Any) -> Any:
    """Return an empty output of the same class, for ranks other than 0 under torchrun."""
    if isinstance(output, tuple):
        return (None,) * len(output)
    if isinstance(output, Mapping):  # diffusers' own have no item for a field that is None
        names = [field.name for field in fields(output)] if is_dataclass(output) else output
        return type(output)(**dict.fromkeys(names))
    return None


def gather_objects(comm: Communicator, axis: Axis, own: Any) -> list[Any]:
    """Return the picklable objects of all ranks of `axis`, in order. Raises ExchangeError."""
    return [unpack(data) for data in AllGather(comm, axis, "output", "output").of_bytes(pack(encode(own)))]
