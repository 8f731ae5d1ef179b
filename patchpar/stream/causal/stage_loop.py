"""`StageLoop`: the stage of a block-causal model. It goes on when another rank has died, with the state that it has.

The first finished block goes back to rank 0, which makes the adaptive sink from it: a change like any other, with the
block that enters after block 0 has left the last step, so that no stage waits for it.

What each stage keeps of its blocks, and what they send one another after a death:

    need          stage k+1 -> k     the next block that it takes, and whether its state is lost
    conditions    stage k -> k+1     if that is so: prompt, sink and so on, as they were after the block before
    blocks        stage k -> k+1     once more, all that it still needs

Only latents have to be kept for it, as many as can be in flight. A stage whose state is lost goes on with an empty
window from the block that the next stage needs; all others go on as if nothing had happened.
"""

from collections import deque
from dataclasses import replace
from typing import Any

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Messages, Work
from patchpar.plan.stream_plan import StreamPlan
from patchpar.shard.host_memory import to_host
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Change, Reference
from patchpar.stream.messages import BeginBlock, LostStage, StreamRun, Update
from patchpar.stream.stage import FinishedBlock, Stage, StageIO
from patchpar.stream.stage_link import (
    WHERE,
    BlockEnvelope,
    BlockSignal,
    Payload,
    connected,
    received,
    received_object,
    send_object,
)

KIND = "resume"


class StageLoop(Stage):
    """Runs rank `rank` of `plan`, whose steps are denoising steps of blocks.

    With a run that `continues`, `go_on` has to be called before it is run.
    """

    _model: WanStream

    def __init__(
        self,
        model: WanStream,
        plan: StreamPlan,
        rank: int,
        comm: Communicator | None,
        stage_io: StageIO,
        run: StreamRun,
    ) -> None:
        super().__init__(model, plan, rank, comm, stage_io, run.first_block)
        self._states = [model.new_state(step) for step in self._position.stage.steps]
        self._decoder: Any = model.new_decoder() if self._position.decodes else None
        self._has_settled = False  # the adaptive sink is there, or there will be none
        self._has_reference = False
        self._first: Payload | None = None
        self._first_sent: Work[Messages] | None = None
        self._is_lost = run.continues  # the state of this stage: it is new, or within a step
        self._lost, self._next = run.lost, run.first_block
        self._kept = deque[tuple[BlockEnvelope, Any]](maxlen=run.keep)  # what has left, and the conditions after it
        self._finished = deque[FinishedBlock](maxlen=run.keep)
        self._decoded: Payload = ()
        self._loss: LostStage | None = None  # to be reported with the next block

    def _begin(self, block: int, order: BeginBlock) -> tuple[tuple[Update, ...], Payload]:
        changes = (*self._adaptive_sink(block), *order.updates)
        self._has_reference |= block > self._first_block and any(isinstance(change, Reference) for change in changes)
        payload = self._model.begin(block, order.inputs)
        if order.frames is not None:
            payload = self._model.noised(block, payload, order.frames)
        if order.pose is not None:
            payload = self._model.posed(payload, order.pose)
        return changes, payload

    def _adaptive_sink(self, block: int) -> tuple[Change, ...]:
        """The adaptive sink, at a block independent of the number of ranks; none if a reference was set since."""
        is_due = block == self._first_block + self._model.steps and not self._has_settled
        if not is_due or not self._model.adapts_sink:
            return ()
        first = self._fetch_first()
        return () if first is None or self._has_reference else (self._model.adaptive_sink(first),)

    def _fetch_first(self) -> Payload | None:
        """The first finished block on rank 0, received only now: a stream that ends before it leaves nothing behind."""
        is_here = self._first is not None or self._rank == self._plan.finisher or self._has_settled
        if self._rank == 0 and self._model.adapts_sink and not is_here:
            self._first = received(connected(self._comm), "first", self._plan.finisher, self._model.payload())
        return self._first

    def _handle(self, envelope: BlockEnvelope) -> None:
        if envelope.sign is BlockSignal.REFILL:
            self._model.decode(self._decoder, envelope.payload)
            self._decoded = envelope.payload
            assert self._loss is not None, "only a decoder that was lost is refilled"
            self._loss = replace(self._loss, refills=True)
            return
        if envelope.sign is BlockSignal.BLOCK and self._loss is not None:
            envelope, self._loss = replace(envelope, lost=(*envelope.lost, self._loss)), None
        super()._handle(envelope)

    def _work(self, envelope: BlockEnvelope) -> None:
        self._is_lost = True
        if envelope.sign is BlockSignal.BLOCK:
            self._lose_again(envelope.block)
        done = self._computed(envelope)
        self._next, self._is_lost = done.block + 1, False
        if self._position.next is not None and done.sign is BlockSignal.BLOCK:
            self._kept.append((done, self._model.conditions(self._states[-1]) if self._states else None))
        self._send(done)

    def _computed(self, envelope: BlockEnvelope) -> BlockEnvelope:
        """A block after the steps of this stage."""
        payload = envelope.payload
        is_wanted = envelope.sign is BlockSignal.BLOCK
        if is_wanted:
            for state in self._states:
                for change in envelope.changes:
                    self._model.apply(state, change)
                payload = self._model.step(state, envelope.block, payload)
        if self._position.is_shared and self._comm is not None:
            self._comm.transport.settle(WHERE)  # what the others have of the step has come, or it is not computed
        if self._rank == self._plan.finisher and envelope.block == self._first_block and self._model.adapts_sink:
            self._send_first(payload)
        if self._position.decodes and is_wanted:
            frames = self._model.decode(self._decoder, payload)
            block, born, lost = envelope.block, envelope.born, envelope.lost
            finished = FinishedBlock(block=block, frames=frames, latents=payload, born=born, lost=lost)
            self._finished.append(finished)
            self._decoded = payload
            self._stage_io.put(finished)
        return replace(envelope, payload=payload)

    def _send_first(self, payload: Payload) -> None:
        if self._rank == 0:
            self._first = payload
        else:
            self._first_sent = connected(self._comm).send("first", WHERE, [0], payload)

    def _settle(self) -> None:
        if self._block > self._first_block:
            self._fetch_first()
        if self._first_sent is not None:
            self._first_sent.wait()
        super()._settle()

    def go_on(self, stage_io: StageIO, first_block: int) -> None:
        """Prepare to run again after ranks have died. `first_block`: the next that comes out. Raises ExchangeError.

        A rank that was started anew, or was interrupted within a step, goes on without its state; so do ranks that
        share a step, which may be at different layers.
        """
        position, self._stage_io = self._position, stage_io
        is_lost = self._is_lost or position.is_shared
        need, next_is_lost = first_block, False
        if position.next is not None:
            need, next_is_lost = received_object(connected(self._comm), KIND, position.next)
        if is_lost:
            self._next = need
        if position.leads and position.source is not None:
            send_object(connected(self._comm), KIND, position.source, (self._next, is_lost))
        if is_lost:
            self._restore()
        if position.next is not None and next_is_lost and self._next_has_steps:
            (conditions,) = (after for kept, after in self._kept if kept.block == need - 1)
            self._give(position.next, conditions)
        self._first_sent, self._has_settled, self._left = None, True, None
        if is_lost:
            self._block = self._next
        self._connect()
        self._send_again(need, first_block, next_is_lost=next_is_lost)

    @property
    def _next_has_steps(self) -> bool:
        return bool(self._plan.stages[self._position.number + 1].steps)

    def _give(self, peer: int, conditions: Any) -> None:
        """Send conditions to rank `peer`, which has lost them; None if they come with the next block."""
        send_object(connected(self._comm), KIND, peer, None if conditions is None else conditions.each(to_host))

    def _restore(self) -> None:
        """Make new states, with the conditions that the stage before gives, or else those of the next order."""
        position, model = self._position, self._model
        steps, given = position.stage.steps, None
        if position.source is not None and steps:
            given = received_object(connected(self._comm), KIND, position.source)
        for peer in position.peers:
            self._give(peer, given)
        self._states = [model.new_state(step) if given is None else model.restored(step, given) for step in steps]
        self._decoder = model.new_decoder() if position.decodes else None
        self._kept.clear()
        self._kept.append((BlockEnvelope(sign=BlockSignal.REST, block=self._next - 1), given))  # before it began
        self._finished.clear()
        self._is_lost = False
        if position.leads:
            decodes = position.decodes
            self._loss = LostStage(block=self._next, start=steps.start, stop=steps.stop, decodes=decodes)
            if self._rank == 0:
                self._stage_io.lost(self._loss)

    def _send_again(self, need: int, first_block: int, *, next_is_lost: bool) -> None:
        """Send what the next stage still needs, and put what has not come out."""
        for finished in self._finished:
            if finished.block >= first_block:
                self._stage_io.put(finished)
        if self._out is None:
            return
        refills = next_is_lost and not self._next_has_steps
        for kept in (envelope for envelope, _ in self._kept if envelope.sign is BlockSignal.BLOCK):
            if kept.block >= need:
                self._out.send(kept)
            elif refills and kept.block == need - 1:
                self._out.send(replace(kept, sign=BlockSignal.REFILL, changes=(), lost=()))

    def _lose_again(self, block: int) -> None:
        """In a run that is repeated, lose the states that were lost before this block."""
        for lost in self._lost:
            if lost.block != block:
                continue
            for number, step in enumerate(self._position.stage.steps):
                if step in range(lost.start, lost.stop):
                    conditions = self._model.conditions(self._states[number])
                    self._states[number] = self._model.restored(step, conditions)
            if lost.decodes and self._position.decodes:
                self._decoder = self._model.new_decoder()
                if lost.refills:
                    self._model.decode(self._decoder, self._decoded)
