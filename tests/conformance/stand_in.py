"""A stand-in for torch.distributed over NCCL, between ranks that are threads of this process, on tensors of the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport import link_groups, torch_groups, torch_p2p
from patchpar.comm.transport.group_transport import GroupTransport
from patchpar.comm.transport.link_groups import GroupMember
from patchpar.comm.transport.torch_p2p import TorchTransport
from tests.conformance.buffers import BufferGuard, Region
from tests.conformance.nccl import MESSAGES, Buffer, Group, Operation, SimulatedCommunicator
from tests.conformance.turns import Turns


class SimulatedRank(threading.local):
    """The rank of the current thread."""

    number = -1
    where = ""
    num_groups = 0
    tape: Any = None
    """What is told of every operation begun and awaited, if a step is being recorded; see `tests.gpu.op_tape`."""
    guard: BufferGuard


@dataclass(frozen=True)
class RankGroup:
    """A process group as one rank has it."""

    communicator: SimulatedCommunicator
    stand_in: StandIn

    def abort(self) -> None: ...

    def all_gather_single(self, out: Tensor, own: Tensor, options: Any) -> SimulatedWork:
        """See torch's ProcessGroup."""
        assert getattr(options, "asyncOp", True)  # torch 2.6 does not have it
        return self.stand_in.all_gather(self, out, own)

    def all_to_all_single(
        self, out: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int], options: Any
    ) -> SimulatedWork:
        """See torch's ProcessGroup."""
        assert getattr(options, "asyncOp", True)  # torch 2.6 does not have it
        return self.stand_in.all_to_all(self, out, own, received, sent)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> SimulatedWork:
        """See torch's ProcessGroup."""
        return self.stand_in.message(self, tensors, to, is_send=True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> SimulatedWork:
        """See torch's ProcessGroup."""
        return self.stand_in.message(self, tensors, source, is_send=False)


class SimulatedWork:
    """The handle of a group: `wait` makes the current stream wait."""

    def __init__(self, stand_in: StandIn, group: Group, regions: Sequence[Region]) -> None:
        self._stand_in, self._group, self._regions = stand_in, group, regions

    def wait(self, timeout: Any = None) -> bool:
        """Let other ranks run until the operations are over: what follows on the stream comes after them."""
        if timeout is not None:
            self._stand_in.faults.append(f"{self._group}: the process waits, not the stream")
        rank = self._stand_in.rank
        if rank.guard.stream != self._group.stream:
            self._stand_in.faults.append(
                f"{self._group}: started on stream {self._group.stream}, awaited on {rank.guard.stream}, so that its "
                "buffers may be freed too early"
            )
        self._stand_in.turns.wait(rank.number, lambda: self._group.is_over)
        rank.guard.waited(self._regions)
        self._stand_in.unawaited.discard(self._group)
        if rank.tape is not None:
            rank.tape.waited(self)
        return True

    def is_completed(self) -> bool:
        return self._group.is_over


class StandIn:
    """What replaces torch.distributed's functions while `patched`."""

    def __init__(self, world: int) -> None:
        self.world, self.faults = world, []
        self.rank = SimulatedRank()
        self.communicators: list[SimulatedCommunicator] = []
        self.unawaited: set[Group] = set()
        self.turns = Turns(world, lambda: "; ".join(self.left()) or "a rank waits for nothing")
        self.all_gather, self.all_to_all = self._taped(self._all_gather), self._taped(self._all_to_all)
        self.faults: list[str]

    def left(self) -> list[str]:
        """Operations that have not been carried out."""
        return [each for communicator in self.communicators for each in communicator.left()]

    def run(self, function: Callable[[TorchTransport], Any]) -> list[Any]:
        """What `function` returns or raises on each rank."""

        def live(rank: int) -> Any:
            self.rank.number, self.rank.guard = rank, BufferGuard(self.faults)
            transport = TorchTransport(torch.device("cpu"), 60.0)
            try:
                with self.rank.guard, torch.no_grad():
                    return function(transport)
            finally:
                transport.close()

        with self.patched():
            found = self.turns.run(live)
        self.faults += [f"not carried out at the end: {each}" for each in self.left()]
        self.faults += [f"never awaited: {group}" for group in self.unawaited]
        return found

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Put this in the place of torch.distributed and CUDA."""
        stand_ins = {
            "get_rank": lambda *_: self.rank.number,
            "get_world_size": lambda *_: self.world,
            "get_backend_config": lambda *_: "cpu:nccl",
            "is_initialized": lambda: True,
            "new_group": self._new_group,
            "destroy_process_group": lambda *_: None,
            "barrier": lambda *_, **__: mock.Mock(),
            "isend": "send",
            "irecv": "receive",
            "P2POp": lambda what, x, peer, group: (what, x, peer, group),
            "ProcessGroupNCCL": mock.Mock(),
            "batch_isend_irecv": self._taped(self._batch),
        }
        start = GroupTransport._start

        def noted(transport: GroupTransport, *operations: Any) -> Any:
            self.rank.where = operations[-1]
            return start(transport, *operations)

        with ExitStack() as stack:
            for name, found in stand_ins.items():
                stack.enter_context(mock.patch.object(dist, name, found, create=True))
            stack.enter_context(mock.patch.object(GroupTransport, "_start", noted))
            # A rank is known by its thread.
            stack.enter_context(mock.patch.object(torch_groups, "within", lambda seconds, make, device: make()))
            stack.enter_context(mock.patch.object(torch_p2p, "within", lambda seconds, make, device: make()))
            stack.enter_context(mock.patch.object(link_groups, "standalone_group", self._standalone))
            stack.enter_context(mock.patch.object(torch.cpu, "Event", _Event))
            stack.enter_context(mock.patch.object(torch.cpu, "current_device", return_value=0))
            yield

    def _taped(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*args: Any, **kwargs: Any) -> Any:
            if self.rank.tape is not None:
                self.rank.tape.begins(args, kwargs)
            found = begin(*args, **kwargs)
            if self.rank.tape is not None:
                self.rank.tape.begun(begin, args, kwargs, found)
            return found

        return begun

    def _new_group(self, ranks: Sequence[int], *_: Any) -> RankGroup:
        """All ranks make the same groups in the same order."""
        number = self.rank.num_groups
        self.rank.num_groups += 1
        if number == len(self.communicators):
            self.communicators.append(SimulatedCommunicator(f"group {number}", tuple(ranks), self.faults))
        if self.communicators[number].ranks != tuple(ranks):
            self.faults.append(f"group {number} has ranks {self.communicators[number].ranks}, and also {ranks}")
        return RankGroup(self.communicators[number], self)

    def _standalone(self, store: Any, own: GroupMember) -> RankGroup:
        """Ranks meet by the label of their group."""
        found = [each for each in self.communicators if each.name == own.label]
        if not found:
            found = [SimulatedCommunicator(own.label, own.ranks, self.faults)]
            self.communicators += found
        assert own.ranks[own.index] == self.rank.number
        return RankGroup(found[0], self)

    def message(self, group: RankGroup, tensors: Sequence[Tensor], peer: int, *, is_send: bool) -> SimulatedWork:
        """One message to or from the rank at position `peer` of a group."""
        (x,) = tensors
        return self._posted(group, MESSAGES, [Operation(is_send, group.communicator.ranks[peer], Buffer(x))])

    def _batch(self, operations: Sequence[Any]) -> list[SimulatedWork]:
        (group,) = {group for *_, group in operations}
        found = [Operation(what == "send", peer, Buffer(x)) for what, x, peer, _ in operations]
        return [self._posted(group, MESSAGES, found)]

    def _all_gather(self, group: RankGroup, out: Tensor, own: Tensor) -> SimulatedWork:
        ranks, whole, own_part = group.communicator.ranks, Buffer(out), Buffer(own)
        if whole.num_bytes != len(ranks) * own_part.num_bytes:
            self.faults.append(f"all-gather of {own_part.num_bytes} bytes of {len(ranks)} ranks into {whole.num_bytes}")
        sends = [Operation(True, rank, own_part) for rank in ranks]
        parts = [
            Operation(False, r, whole.part(i * own_part.num_bytes, own_part.num_bytes)) for i, r in enumerate(ranks)
        ]
        return self._posted(group, "all-gather", sends + parts)

    def _all_to_all(
        self, group: RankGroup, out: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> SimulatedWork:
        found: list[Operation] = []
        for is_send, x, sizes in ((True, own, sent), (False, out, received)):
            assert x.is_contiguous()
            assert sum(sizes) == x.numel()
            starts = [sum(sizes[:index]) * x.itemsize for index in range(len(sizes))]
            found += [
                Operation(is_send, rank, Buffer(x).part(start, size * x.itemsize))
                for rank, start, size in zip(group.communicator.ranks, starts, sizes, strict=True)
            ]
        return self._posted(group, "all-to-all", found)

    def _posted(self, group: RankGroup, kind: str, operations: Sequence[Operation]) -> SimulatedWork:
        rank = self.rank
        posted = Group(rank.number, kind, rank.where, operations, rank.guard.stream)
        regions = [
            region
            for received in (False, True)
            for region in rank.guard.started(
                [op.buffer for op in operations if op.is_send != received], received=received
            )
        ]
        self.unawaited.add(posted)
        group.communicator.post(posted, threading.get_ident())
        return SimulatedWork(self, posted, regions)


class _Event:
    """An event of a stream that is always over."""

    def __init__(self, *, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return 0.0
