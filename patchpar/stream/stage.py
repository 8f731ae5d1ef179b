"""The loop of one rank in a stream: receive a block, apply its changes, run this rank's steps, send the block on.

    tick           0     1     2     3     4     5
    rank 0         b0    b1    b2    b3    b4    b5      step 0
    rank 1               b0    b1    b2    b3    b4      step 1
    rank 2                     b0    b1    b2    b3      decode

There is no clock, and no collective between stages: a stage waits for its block only (Live Avatar, arXiv:2512.04677,
section 4.2). Where several ranks share a stage, its first rank receives the block, forwards it to the others before it
computes anything, and sends the result on. The first finished block goes back to rank 0, which makes the adaptive sink
from it: a change like any other, with the block that enters after block 0 has left the last step, so that no stage
waits for it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Messages, Work
from patchpar.errors import PlanError
from patchpar.stream.causal_model import CausalModel, Payload
from patchpar.stream.events import Change, Reference
from patchpar.stream.messages import LostStage
from patchpar.stream.plan import StageSteps, StreamPlan
from patchpar.stream.stage_link import BlockEnvelope, BlockSignal, Downstream, Upstream, check_connected, connected
from patchpar.stream.stage_position import StagePosition


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """Order for the first stage: begin a block with `inputs` and `changes`, rest, or end the stream.

    `frames`: see BeginBlock.
    """

    sign: BlockSignal
    inputs: Payload = ()
    changes: tuple[Change, ...] = ()
    frames: Tensor | None = None


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

    order: Callable[[int, float], StageOrder]
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


class StageInlet(Protocol):
    """The source of a stage's blocks."""

    def take(self) -> BlockEnvelope:
        """Return the next message."""


class Stage(ABC):
    """The loop of one rank: takes messages from `_in`, works on blocks, and sends them on through `_out`."""

    _in: StageInlet
    _out: Downstream | None

    def __init__(self, rank: int, comm: Communicator | None, stage_io: StageIO) -> None:
        self._rank, self._comm, self._stage_io = rank, comm, stage_io

    def run(self) -> StageStats:
        """Run until the stream ends. Raises ExchangeError if another rank is late or has died."""
        blocks, busy, waited = 0, 0.0, 0.0
        sign = BlockSignal.REST
        while sign is not BlockSignal.END:
            start = time.perf_counter()
            envelope = self._in.take()
            sign, arrived = envelope.sign, time.perf_counter()
            self._handle(envelope)
            if sign.is_block:
                busy += time.perf_counter() - arrived
                waited += arrived - start if blocks else 0.0
                blocks += 1
        self._settle()
        return StageStats(rank=self._rank, blocks=blocks, busy=busy, waited=waited)

    @abstractmethod
    def _handle(self, envelope: BlockEnvelope) -> None:
        """Work on a block, and send any message on."""

    @abstractmethod
    def _settle(self) -> None:
        """After the last message: wait until all messages have been sent. Raises ExchangeError."""


def order_patience(comm: Communicator | None) -> float:
    """Return the seconds that the first rank waits for an order before it sends a message without a block."""
    return 1.0 if comm is None else comm.transport.deadline / 4


class OrderInlet:
    """The inlet of the first stage: makes a block per order, for which it waits `patience` seconds.

    `has_settled`: the adaptive sink is there already.
    """

    def __init__(
        self, model: CausalModel, stage_io: StageIO, patience: float, first_block: int, *, has_settled: bool = False
    ) -> None:
        self._model, self._stage_io, self._patience = model, stage_io, patience
        self._block = self._first_block = first_block
        self._has_settled = has_settled
        self._back: Work[Messages] | None = None
        self._first: Payload | None = None
        self._has_reference = False

    def go_on(self, stage_io: StageIO) -> None:
        """Take orders from `stage_io` from now on."""
        self._stage_io = stage_io

    def expect_first(self, back: Work[Messages]) -> None:
        """Set the receive of the first finished block, where another stage finishes it."""
        self._back = back

    def keep_first(self, payload: Payload) -> None:
        """Store the first finished block, where this stage finishes it."""
        self._first = payload

    def take(self) -> BlockEnvelope:
        """See StageInlet."""
        cancelled = self._stage_io.is_cancelled()
        order = StageOrder(sign=BlockSignal.END) if cancelled else self._stage_io.order(self._block, self._patience)
        if order.sign is not BlockSignal.BLOCK:
            if order.sign is BlockSignal.END and self._block > self._first_block:
                self._fetch_first()
            return BlockEnvelope(sign=order.sign)
        block, born = self._block, time.time_ns()
        changes = (*self._adaptive_sink(block), *order.changes)
        self._has_reference |= block > self._first_block and any(isinstance(change, Reference) for change in changes)
        self._block += 1
        payload = self._model.begin(block, order.inputs)
        if order.frames is not None:
            payload = self._model.noised(block, payload, order.frames)
        return BlockEnvelope(sign=BlockSignal.BLOCK, block=block, born=born, changes=changes, payload=payload)

    def _adaptive_sink(self, block: int) -> tuple[Change, ...]:
        """The adaptive sink, at a block independent of the number of ranks; none if a reference was set since."""
        is_due = block == self._first_block + self._model.steps and not self._has_settled
        if not is_due or not self._model.adapts_sink:
            return ()
        first = self._fetch_first()
        return () if first is None or self._has_reference else (self._model.adaptive_sink(first),)

    def _fetch_first(self) -> Payload | None:
        if self._back is not None:
            self._first, self._back = tuple(self._back.wait_for(0)), None
        return self._first


class StageLoop(Stage):
    """Runs rank `rank` of `plan` from block number `first_block` to the last. Raises PlanError."""

    def __init__(
        self,
        model: CausalModel,
        plan: StreamPlan,
        rank: int,
        comm: Communicator | None,
        stage_io: StageIO,
        first_block: int = 0,
    ) -> None:
        self._position = StagePosition.of(plan, rank)
        _check(model, plan, self._position.stage, comm)
        super().__init__(rank, comm, stage_io)
        self._model, self._plan, self._first_block = model, plan, first_block
        self._states = [model.new_state(step) for step in self._position.stage.steps]
        self._decoder = model.new_decoder() if self._position.decodes else None
        self._beginning: OrderInlet | None = None
        self._first_sent: Work[Messages] | None = None
        self._is_connected = False

    def run(self) -> StageStats:
        """See Stage."""
        if not self._is_connected:
            self._begin()
        return super().run()

    def _begin(self) -> None:
        """Connect with the other stages, for a stream's first block."""
        model, position = self._model, self._position
        if self._rank == 0:
            self._beginning = OrderInlet(model, self._stage_io, order_patience(self._comm), self._first_block)
            if model.adapts_sink and not position.makes_first:
                leader = self._plan.stages[len(self._plan.sizes) - 1].ranks[0]
                back = connected(self._comm).receive("first", "stream", leader, model.payload())
                self._beginning.expect_first(back)
        self._connect()

    def _connect(self) -> None:
        """Receive from the stage before and send to the next, and to the other ranks of this one."""
        position, specs, self._is_connected = self._position, self._model.payload(), True
        if self._beginning is not None:
            self._in = self._beginning
        else:
            assert position.source is not None, "all ranks but the first have one"
            self._in = Upstream(connected(self._comm), position.source, specs, ahead=position.leads)
        self._peers = Downstream(connected(self._comm), position.peers, specs) if position.peers else None
        self._out = None if position.next is None else Downstream(connected(self._comm), [position.next], specs)

    def _handle(self, envelope: BlockEnvelope) -> None:
        """The stage's first rank marks blocks as VOID if cancelled, and forwards all messages to the others."""
        if self._position.leads and envelope.sign is BlockSignal.BLOCK and self._stage_io.is_cancelled():
            envelope = replace(envelope, sign=BlockSignal.VOID)
        if self._peers is not None:
            self._peers.send(envelope)
        if envelope.sign.is_block:
            envelope = self._work(envelope)
        if self._out is not None:
            self._out.send(envelope)

    def _work(self, envelope: BlockEnvelope) -> BlockEnvelope:
        payload = envelope.payload
        is_wanted = envelope.sign is BlockSignal.BLOCK
        if is_wanted:
            for state in self._states:
                for change in envelope.changes:
                    self._model.apply(state, change)
                payload = self._model.step(state, envelope.block, payload)
        if self._position.makes_first and envelope.block == self._first_block and self._model.adapts_sink:
            self._send_first(payload)
        if self._position.decodes and is_wanted:
            frames = self._model.decode(self._decoder, payload)
            block, born, lost = envelope.block, envelope.born, envelope.lost
            self._put(FinishedBlock(block=block, frames=frames, latents=payload, born=born, lost=lost))
        return replace(envelope, payload=payload)

    def _put(self, finished: FinishedBlock) -> None:
        self._stage_io.put(finished)

    def _send_first(self, payload: Payload) -> None:
        if self._beginning is not None:
            self._beginning.keep_first(payload)
        else:
            self._first_sent = connected(self._comm).send("first", "stream", [0], payload)

    def _settle(self) -> None:
        if self._first_sent is not None:
            self._first_sent.wait()
        for way in (self._peers, self._out):
            if way is not None:
                way.settle()


def _check(model: CausalModel, plan: StreamPlan, stage: StageSteps, comm: Communicator | None) -> None:
    if plan.steps != model.steps:
        raise PlanError(f"the plan has {plan.steps} steps, but the model has {model.steps}")
    if stage.steps and plan.inner != model.inner:
        raise PlanError(f"the plan has {plan.inner} ranks for each step, but the model was made for {model.inner}")
    check_connected(plan.ranks, comm)
