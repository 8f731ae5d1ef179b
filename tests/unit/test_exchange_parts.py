"""An exchange of several parts as one operation of all ranks brings and counts what single messages bring and count."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec, Transport
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.plan.mesh import Axis
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.tensors import noise
from tests.unit.threads import on_threads

DTYPES = (torch.float32, torch.float16, torch.uint8, torch.float64, torch.int8)
STEPS = 3


@dataclass(frozen=True)
class Message:
    """What one rank sends to some others in a part: tensors of these specs. `comes_into`: buffers of the receivers."""

    sender: int
    receivers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    comes_into: bool

    def tensors(self, step: int, number: int) -> list[Tensor]:
        """Its values in a step, new ones in each; each tensor lies elsewhere, and some of them not contiguously."""
        found = []
        for index, spec in enumerate(self.specs):
            x = (100 * noise(*spec.shape, seed=1000 * step + 100 * number + 10 * self.sender + index)).to(spec.dtype)
            found.append(x.t().contiguous().t() if x.ndim == 2 and index % 2 else x)
        return found


@dataclass(frozen=True)
class Plan:
    """The parts of an exchange between so many ranks. `to_all`: each part is what every rank sends to all others."""

    world: int
    parts: Sequence[Sequence[Message]]
    to_all: bool

    @classmethod
    def of(cls, seed: int) -> Plan:
        """A random one."""
        rng = random.Random(seed)
        world, to_all = rng.choice((2, 3, 4)), rng.random() < 0.3
        return cls(world, [cls._messages(rng, world, to_all) for _ in range(rng.choice((1, 1, 2, 3)))], to_all)

    @staticmethod
    def _messages(rng: random.Random, world: int, to_all: bool) -> list[Message]:
        dtypes = rng.sample(DTYPES, rng.choice((1, 1, 2)))
        specs = tuple(
            TensorSpec(rng.choice(((3,), (2, 5), (4, 4), (1, 7))), rng.choice(dtypes))
            for _ in range(rng.choice((1, 2)))
        )
        comes_into, found = rng.random() < 0.4, list[Message]()
        for sender in range(world):
            others = [rank for rank in range(world) if rank != sender]
            if to_all:
                found.append(Message(sender, tuple(others), specs, comes_into))
                continue
            rng.shuffle(others)
            cut = rng.randint(0, len(others))
            for receivers in (others[:cut], others[cut : cut + rng.randint(0, 2)]):
                if receivers:
                    found.append(Message(sender, tuple(receivers), specs[: rng.randint(1, 2)], comes_into))
        return found


def exchanged(transport: Transport, plan: Plan, *, remembers: bool, bulk: bool) -> list[Any]:
    """What a rank gets in some steps, by part and sender, and all bytes that it counts."""
    comm, mine = Communicator(transport), transport.rank
    axis, found = Axis("patch", mine, plan.world, tuple(range(plan.world))), list[Any]()
    memory = MessageMemory() if remembers else None
    in_one_buffer = len(plan.parts) == 1 and not plan.to_all
    into, wholes = zip(*(_buffers(messages, mine, whole=in_one_buffer) for messages in plan.parts), strict=True)
    where_kept = set[tuple[int, ...]]()
    for step in range(STEPS):
        parts = [_part(plan, number, axis, step, into[number], wholes[number]) for number in range(len(plan.parts))]
        received = comm.exchange("here", parts, bulk=bulk, memory=memory).wait()
        for given, got in zip(into, received, strict=True):
            for sender, buffers in given.items():
                assert all(torch.equal(x, y) for x, y in zip(buffers, got[sender], strict=True))
        found.append([{sender: [x.clone() for x in got[sender]] for sender in sorted(got)} for got in received])
        if memory is not None:
            where_kept.add(tuple(x.data_ptr() for x in memory.tensors()))
            sent = [x for part in parts for _, tensors in part.outgoing for x in tensors]
            copies = [memory.sent(x) for x in sent]
            assert all(torch.equal(x, y) for x, y in zip(copies, sent, strict=True))
            if not plan.to_all:  # these are packed
                assert all(x.data_ptr() != y.data_ptr() for x, y in zip(copies, sent, strict=True))
    assert len(where_kept) <= 1, "a step that is repeated receives elsewhere than the one before"
    traffic = comm.traffic
    return [found, dict(traffic.bytes_sent), dict(traffic.bytes_received)]


Buffers = dict[int, tuple[Tensor, ...]]


def _buffers(messages: Sequence[Message], mine: int, *, whole: bool) -> tuple[Buffers, Tensor | None]:
    """Buffers that tensors of each sender come into: if `whole`, parts of one that is returned too, in their order."""
    specs = {each.sender: each.specs for each in messages if mine in each.receivers and each.comes_into}
    dtypes = {spec.dtype for found in specs.values() for spec in found}
    if not (whole and len(dtypes) == 1):
        return {key: tuple(torch.zeros(x.shape).to(x.dtype) for x in found) for key, found in specs.items()}, None
    sizes = [math.prod(spec.shape) for key in sorted(specs) for spec in specs[key]]
    buffer = torch.zeros(sum(sizes)).to(dtypes.pop())
    parts = iter(buffer.split(sizes))
    return {key: tuple(next(parts).view(x.shape) for x in specs[key]) for key in sorted(specs)}, buffer


def _part(plan: Plan, number: int, axis: Axis, step: int, into: Buffers, whole: Tensor | None) -> ExchangePart:
    messages = plan.parts[number]
    outgoing = [
        (message.receivers, tuple(message.tensors(step, number))) for message in messages if message.sender == axis.rank
    ]
    incoming = {message.sender: message.specs for message in messages if axis.rank in message.receivers}
    kind, at_once = f"kind {number}", bool(into)
    return ExchangePart(kind, outgoing, incoming, into, axis, plan.to_all, at_once=at_once, whole=whole)


@pytest.mark.parametrize("seed", first_of(range(100), *range(16)))
def test_one_operation_brings_what_messages_bring(seed: int) -> None:
    plan, used = Plan.of(seed), list[set[str]]()
    for remembers, bulk in ((False, False), (True, True)):
        stand_in = StandIn(plan.world)
        together = stand_in.run(lambda transport, r=remembers, b=bulk: exchanged(transport, plan, remembers=r, bulk=b))
        assert not any(isinstance(each, BaseException) for each in together), together
        assert stand_in.faults == []
        used.append({each.name for each in stand_in.communicators if each.num_posted})
        single = on_threads(plan.world, lambda transport: exchanged(transport, plan, remembers=False, bulk=False))
        assert not any(isinstance(each, Exception) for each in single), single
        for rank, (found, wanted) in enumerate(zip(together, single, strict=True)):
            assert found[1:] == wanted[1:]
            for step, (got, want) in enumerate(zip(found[0], wanted[0], strict=True)):
                for number, messages in enumerate(plan.parts):
                    sent = {m.sender: m.tensors(step, number) for m in messages if rank in m.receivers}
                    for tensors in (got[number], want[number]):
                        assert tensors.keys() == sent.keys()
                        assert all(
                            torch.equal(x, y) for key in sent for x, y in zip(tensors[key], sent[key], strict=True)
                        )
    assert not used[0] & used[1], "what is not needed in this step holds up what is"
