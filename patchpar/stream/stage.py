"""The loop of one rank in a stream: receive a block, apply its changes, run this rank's steps, send the block on.

There is no clock, and no collective between stages: a stage waits for its block only (Live Avatar, arXiv:2512.04677,
section 4.2). Zones of a queue of frames are stages of the same loop, see `fifo.stage`. Where several ranks share a
stage, its first rank receives the block, forwards it to the others before it computes anything, and sends the result
on.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, cast

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.plan.stream_plan import StagePosition, StreamPlan
from patchpar.stream.events import Change
from patchpar.stream.messages import BeginBlock, EndStream, LostStage, Update
from patchpar.stream.stage_link import BlockEnvelope, BlockSignal, Downstream, Payload, Upstream, connected

Order = BeginBlock | EndStream | None
"""What the first stage is to do: begin a block, whose `updates` are Changes by now, end the stream, or rest."""


class StageModel(Protocol):
    """What the loop of every stage needs of a model. A payload holds tensors of the shapes that `payload` states."""

    def payload(self) -> tuple[TensorSpec, ...]:
        """Return shapes and dtypes of the tensors passed from one stage to the next, the same for every block."""

    def begin(self, block: int, inputs: Payload) -> Payload:
        """Return the payload with which a block enters the first stage: noise, and `inputs` such as its audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBlock:
    """Frames [frames, height, width, 3] in uint8 of one block, and its latents. `born`, `lost`: see BlockEnvelope."""

    block: int
    frames: Tensor
    latents: Payload
    born: int
    lost: tuple[LostStage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageIO:
    """Callbacks of a stage. `order` is called on the first stage, `put` on the stage that decodes.

    `order(block, patience)`: waits up to `patience` seconds for the next order; after that the order is to rest.
    `is_cancelled`: if True, further blocks are passed on without being computed. `lost`: called when the first
    stage goes on without its state, before it takes an order.
    """

    order: Callable[[int, float], Order]
    put: Callable[[FinishedBlock], object]
    is_cancelled: Callable[[], bool]
    lost: Callable[[LostStage], object] = lambda lost: None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """Statistics of a stage: blocks, seconds of work, and seconds of waiting for blocks after the first."""

    rank: int
    blocks: int
    busy: float
    waited: float


class Stage(ABC):
    """The loop of rank `rank` of `plan`: blocks come from the stage before, are worked on, and go to the next.

    The first stage makes a block per order, from number `first_block` on. After the last order, as many further blocks
    enter as `_drain` says.
    """

    _model: StageModel
    _drain = 0

    def __init__(
        self,
        model: StageModel,
        plan: StreamPlan,
        rank: int,
        comm: Communicator | None,
        stage_io: StageIO,
        first_block: int,
    ) -> None:
        self._plan, self._rank, self._comm, self._stage_io = plan, rank, comm, stage_io
        self._model, self._position = model, StagePosition.of(plan, rank)
        self._first_block = self._block = first_block
        self._left: int | None = None  # blocks that still enter after the last order
        self._in: Upstream | None = None
        self._peers: Downstream | None = None
        self._out: Downstream | None = None
        self._is_connected = False

    def run(self) -> StageStats:
        """Run until the stream ends. Raises ExchangeError if another rank is late or has died."""
        if not self._is_connected:
            self._connect()
        blocks, busy, waited = 0, 0.0, 0.0
        sign = BlockSignal.REST
        while sign is not BlockSignal.END:
            start = time.perf_counter()
            envelope = self._enter() if self._in is None else self._in.take()
            sign, arrived = envelope.sign, time.perf_counter()
            self._handle(envelope)
            if sign.is_block:
                busy += time.perf_counter() - arrived
                waited += arrived - start if blocks else 0.0
                blocks += 1
        self._settle()
        return StageStats(rank=self._rank, blocks=blocks, busy=busy, waited=waited)

    def _connect(self) -> None:
        """Receive from the stage before and send to the next, and to the other ranks of this one."""
        position, specs, self._is_connected = self._position, self._model.payload(), True
        if position.source is not None:
            self._in = Upstream(connected(self._comm), position.source, specs, ahead=position.leads)
        self._peers = Downstream(connected(self._comm), position.peers) if position.peers else None
        self._out = None if position.next is None else Downstream(connected(self._comm), [position.next])

    def _enter(self) -> BlockEnvelope:
        """On the first rank: the next message, by the next order."""
        order = self._order()
        if not isinstance(order, BeginBlock):
            return BlockEnvelope(sign=BlockSignal.REST if order is None else BlockSignal.END)
        block, born = self._block, time.time_ns()
        self._block += 1
        changes, payload = self._begin(block, order)
        known = cast(tuple[Change, ...], changes)
        return BlockEnvelope(sign=BlockSignal.BLOCK, block=block, born=born, changes=known, payload=payload)

    def _order(self) -> Order:
        """The next order, waited for up to a quarter of the deadline; none is taken after the last one."""
        if self._stage_io.is_cancelled():
            return EndStream()
        if self._left is None:
            order = self._stage_io.order(self._block, 1.0 if self._comm is None else self._comm.transport.deadline / 4)
            if not isinstance(order, EndStream):
                return order
            self._left = self._drain if self._block > self._first_block else 0
        self._left -= 1
        return EndStream() if self._left < 0 else BeginBlock(inputs=(), updates=())

    def _begin(self, block: int, order: BeginBlock) -> tuple[tuple[Update, ...], Payload]:
        """Changes and payload with which a block enters."""
        return order.updates, self._model.begin(block, order.inputs)

    def _handle(self, envelope: BlockEnvelope) -> None:
        """The stage's first rank marks blocks as VOID if cancelled, and forwards all messages to the others."""
        if self._position.leads and envelope.sign is BlockSignal.BLOCK and self._stage_io.is_cancelled():
            envelope = replace(envelope, sign=BlockSignal.VOID)
        if self._peers is not None:
            self._peers.send(envelope)
        if envelope.sign.is_block:
            self._work(envelope)
        else:
            self._send(envelope)

    @abstractmethod
    def _work(self, envelope: BlockEnvelope) -> None:
        """Work on a block, and `_send` it. One that is VOID is not computed."""

    def _send(self, envelope: BlockEnvelope) -> None:
        if self._out is not None:
            self._out.send(envelope)

    def _settle(self) -> None:
        """After the last message: wait until all messages have been sent. Raises ExchangeError."""
        for way in (self._peers, self._out):
            if way is not None:
                way.settle()
