"""`StreamDriver`: a session that sends orders to the ranks of a video stream, and resumes when a rank dies.

    BlockReady(b) from the first rank --> audio of b here? credit? not paused? --> BeginBlock(b) with the updates at b

A resumed stream continues at the first block that has not been delivered, in a new epoch, with the same seed, block
numbers, audio, conditions and sink. Stages whose ranks live go on as they are, and the others with an empty window; in
the first blocks of a stream, and in a FIFO stream at any time, all begin anew.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole, plain
from patchpar.stream.audio_track import AudioSource
from patchpar.stream.base_session import LOST, BaseSession
from patchpar.stream.delivery import Chunk, Effect, StreamDelivery, StreamFormat
from patchpar.stream.events import Reference
from patchpar.stream.messages import (
    BeginBlock,
    BlockReady,
    CancelStream,
    EndStream,
    LostStage,
    ProducedBlock,
    PromptUpdate,
    ReferenceUpdate,
    StreamRun,
    Update,
)
from patchpar.stream.stage import StageStats
from patchpar.stream.video_source import NO_FRAMES, FrameSources

Run = Callable[..., list[Any]]
MAX_UPDATES = 1000
"""Changes that may wait for their blocks."""


SINK = "sink"
"""Kind of the adaptive sink, which does not replace what a reference says besides: its video and its masks."""


def with_updates(known: Mapping[str, Update], updates: Iterable[Update]) -> dict[str, Update]:
    """Return the conditions after `updates`, by kind and in the order of their effect; a prompt is there at once."""
    found = dict(known)
    for update in updates:
        if isinstance(update, (ReferenceUpdate, Reference)):
            found.pop(SINK, None)
            found["reference"] = _with_masks(update, found.get("reference"))
        elif isinstance(update, PromptUpdate):
            found["prompt"] = replace(update, transition="switch", over=0)
        else:
            found[getattr(update, "name", "prompt")] = update
    return found


def _with_masks(update: ReferenceUpdate | Reference, before: Update | None) -> Update:
    """A reference with the masks of the one before, where it has none of its own: speakers stay where they are."""
    has_own = update.masks is not None or type(before) is not type(update)
    return update if has_own else replace(update, masks=getattr(before, "masks", None))


class StreamDriver(BaseSession[Chunk, Effect]):
    """See BaseSession. `run(stream_run, on_event=, on_start=)` runs the stages; called with each of `runs` in turn.

    Each run ends where the next begins. `credit`: blocks that may have begun and not been taken. `blocks`: length; None
    for no end. `figures`: statistics of each stage, after the stream has ended.
    """

    def __init__(  # noqa: PLR0913 - each is a part of its own
        self,
        run: Run,
        runs: Sequence[StreamRun],
        form: StreamFormat,
        delivery: StreamDelivery,
        track: AudioSource | None,
        frames: FrameSources = NO_FRAMES,
        *,
        credit: int,
        blocks: int | None = None,
    ) -> None:
        self._current, *later = (replace(run, keep=credit + 1) for run in runs)
        super().__init__(credit, delivery.output, delivery.lead, delivery.restarts)
        self._run, self._later, self._blocks, self._track = run, deque(later), blocks, track
        self._format, self._delivery, self._frames = form, delivery, frames
        self._patience = delivery.hold
        self._updates: dict[int, list[Update]] = {}
        self._sent: dict[int, tuple[BeginBlock, Tensor | None]] = {}  # until they are delivered
        self._known: dict[str, Update] = {}  # conditions by kind, as of the last block that was delivered
        self._next_out = self._epoch = 0
        self._has_sink = False
        self._settled = None if self._current.settles is None else self._current.first_block + self._current.settles
        self._ready: int | None = None
        self._next = 0
        self._timer: threading.Timer | None = None
        self._source_error: Exception | None = None
        self.figures: tuple[StageStats, ...] = ()

    def _start(self, changes: Iterable[tuple[int, Update]]) -> None:
        """Start the thread, and those that read videos, with changes at their blocks, as many as a recording has."""
        for block, update in changes:
            self._updates.setdefault(block, []).append(update)
        for source in self._frames.read_ahead:
            source.begin(self._look)
        self._thread.start()

    def _end(self, error: Exception | None = None) -> None:
        super()._end(error)
        if self._timer is not None:
            self._timer.cancel()
        for source in self._frames.read_ahead:
            source.close()

    def _update(self, update: Update, at: int | None) -> Effect:
        """Apply a change from block `at` on, by default the next.

        Raises PlanError if it began or is none, if too many changes wait, and once the stream has ended.
        """
        self._check_running()
        with self._changed:
            block = self._next if at is None else plain(at)
            if not is_whole(block, 0):
                raise PlanError(f"at={at!r}: it must be the number of a block, from {self._next} on")
            if block < self._next:
                raise PlanError(f"at={at}: block {at} has begun; use at={self._next} or later")
            if sum(map(len, self._updates.values())) >= MAX_UPDATES:
                raise PlanError(f"{MAX_UPDATES} changes wait for blocks that have not begun: wait for these, or stop")
            self._updates.setdefault(block, []).append(update)
            return self._effect(block)

    def _upcoming(self) -> int:
        return self._next

    def _effect(self, number: int) -> Effect:
        return Effect(block=number, seconds=self._format.seconds(number))

    @abstractmethod
    def _deliver(self, produced: ProducedBlock, begun: BeginBlock, samples: Tensor | None) -> None:
        """Take a finished block, with its order and its audio [N] or None. Under the lock."""

    def _order_cancel(self) -> None:
        """Ranks finish their current step and compute nothing further."""
        for rank in range(self._current.ranks):
            if self._send is not None:
                self._send(rank, CancelStream())

    def _drive(self) -> None:
        run: StreamRun | None = self._current
        while run is not None:
            error, results = None, list[Any]()
            try:
                results = self._run(run, on_event=self._on_event, on_start=self._on_start)
            except Exception as raised:  # noqa: BLE001  the consumer gets it
                error = raised
            with self._changed:
                self._send = self._ready = None
                run = self._next_run(results) if error is None else self._resumed(error)
                self._changed.notify_all()

    def _next_run(self, results: Sequence[Any]) -> StreamRun | None:
        """The run to start after one has ended; None at the end of the stream."""
        self.figures = tuple(stats for stats in results if isinstance(stats, StageStats))
        if self.status == "cancelled" or not self._later or self._is_stopping:
            self._end(self._source_error)
            return None
        self._current = self._later.popleft()
        self._epoch += 1
        return self._current

    def _on_event(self, rank: int, event: Any) -> None:
        with self._changed:
            if isinstance(event, LostStage):
                self._note_lost(event)
            elif isinstance(event, BlockReady):
                self._ready = event.block
                self._order()
            elif isinstance(event, ProducedBlock) and self.status != "cancelled":
                self._note_produced(event)
            self._changed.notify_all()

    def _note_produced(self, produced: ProducedBlock) -> None:
        """Deliver a block. Its updates hold until others of their kind replace them."""
        begun, samples = self._sent.pop(produced.block)
        self._next_out, self._known = produced.block + 1, with_updates(self._known, begun.updates)
        if produced.sink is not None:
            self._known[SINK], self._has_sink = Reference(latents=produced.sink), True
        self._note_recovery()
        self._deliver(produced, begun, samples)

    def _note_lost(self, lost: LostStage) -> None:
        """The first stage goes on without its state: it gets the conditions again with its next order."""
        known = self._known
        for block in range(self._next_out, lost.block):
            known = with_updates(known, self._sent[block][0].updates)
        self._say_again(lost.block, tuple(known.values()))

    def _say_again(self, block: int, again: tuple[Update, ...]) -> None:
        """Put updates before those of a block."""
        if block not in self._sent:
            self._updates.setdefault(block, [])[:0] = again
            return
        begin, samples = self._sent[block]
        self._sent[block] = (replace(begin, updates=(*again, *begin.updates)), samples)

    def _order(self) -> None:
        """Send the next order to the first rank, if it has requested one and an order is possible."""
        block = self._ready
        if block is None or self._send is None or self.is_over:
            return
        if block not in self._sent and not self._has_ended(block):
            if self._is_paused or not self._frames.is_here(block):
                return
            if not self._has_audio(block) or not self._take_credit():
                return
            self._begin(block)
        self._ready = None
        self._send(0, self._sent[block][0] if block in self._sent else EndStream())

    def _begin(self, block: int) -> None:
        """Prepare the order of a block. If its audio or video fails, the stream ends with what is in flight."""
        try:
            tokens, samples = (None, None) if self._track is None else self._track.take(block)
            self._next = block + 1
            frames, pose = self._frames.take(block)
        except Exception as error:  # noqa: BLE001  of the caller's own images; the consumer gets it
            self._source_error, self._is_stopping = error, True
            self.in_flight -= 1
            return
        inputs, updates = () if tokens is None else (tokens,), tuple(self._updates.pop(block, ()))
        self._sent[block] = (BeginBlock(inputs=inputs, updates=updates, frames=frames, pose=pose), samples)

    def _has_audio(self, block: int) -> bool:
        """Whether a block can begin as far as its audio goes. If silence may take its place, look again by then."""
        if self._track is None or self._track.is_here(block):
            return True
        seconds = self._track.seconds_until_silence(block)
        if seconds is not None and self._timer is None:
            self._timer = threading.Timer(seconds, self._look_again)
            self._timer.daemon = True
            self._timer.start()
        return False

    def _look_again(self) -> None:
        """After a wait for audio. Another block may wait by now, for longer: it gets a timer of its own."""
        with self._changed:
            self._timer = None
            self._look()

    def _has_ended(self, block: int) -> bool:
        later = self._later[0].first_block if self._later else None
        is_last = self._is_stopping or block in (self._blocks, later)
        sources = [source for source in (self._track, self._frames.video) if source is not None]
        return is_last or any(source.is_over(block) for source in sources)

    def _resumed(self, error: Exception) -> StreamRun | None:
        if self.status == "cancelled" or not isinstance(error, LOST) or not self._take_restart():
            self._end(error)
            return None
        self._epoch += 1
        self.status = "degraded"
        run = replace(self._current, first_block=self._next_out)
        if self._settled is not None and self._next_out > self._settled:
            self._current = replace(run, continues=True, adapt_sink=False)  # it has been adapted
            return self._current
        self._say_again(self._next_out, tuple(self._known.values()))
        self._settled = None if run.settles is None else self._next_out + run.settles
        self._current = replace(run, adapt_sink=run.adapt_sink and not self._has_sink)
        return self._current
