"""The side of a stream that talks to the ranks: gives orders, keeps what is under way, begins anew when a rank dies.

    BlockReady(b) from the first rank --> sound of b here? credit? not paused? --> BeginBlock(b) with the wishes from b

An interrupted stream goes on at the first block that has not come out, in a new epoch: seed, block numbers, sound and
conditions are those of before, and the sink is the one it had; what the window held is lost.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from patchpar.errors import PlanError, WorkerError
from patchpar.launch.executor import Tell
from patchpar.stream.events import Reference
from patchpar.stream.flow_control import BlockCredits
from patchpar.stream.messages import (
    BeginBlock,
    BlockReady,
    CancelStream,
    EndStream,
    ProducedBlock,
    PromptUpdate,
    ReferenceUpdate,
    StreamRun,
    Update,
)
from patchpar.stream.stage import StageStats

Status = Literal["running", "paused", "degraded", "finished", "cancelled", "failed"]
Run = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """`credit`: blocks between their beginning and the watcher. `blocks`: of the whole stream, or None for no end.

    `restarts`: how often a stream is taken up again after a worker has died.
    """

    credit: int
    blocks: int | None = None
    restarts: int = 1


class AudioSource(Protocol):
    """Where the sound of a stream comes from."""

    def is_here(self, block: int) -> bool:
        """Whether all that block `block` hears has come."""

    def is_over(self, block: int) -> bool:
        """Whether the sound ended before this block begins."""

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """(audio tokens (1, F, n, C), samples (N,)) of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBlock:
    """A block that has come out: what was produced, of which order, its sound, in which course."""

    produced: ProducedBlock
    begun: BeginBlock
    samples: Tensor | None
    course: StreamRun
    epoch: int


@dataclass(slots=True, kw_only=True)
class ResumeState:
    """What an interrupted stream is taken up with: conditions that hold, by kind, and the block to go on at."""

    wishes: dict[str, Update] = field(default_factory=dict)
    next_out: int = 0
    epoch: int = 0
    has_sink: bool = False

    def note(self, produced: ProducedBlock, begun: BeginBlock) -> None:
        """A block has come out: its wishes hold until others of their kind do."""
        self.next_out = produced.block + 1
        for wish in begun.wishes:
            kind = "reference" if isinstance(wish, (ReferenceUpdate, Reference)) else getattr(wish, "name", "prompt")
            self.wishes[kind] = replace(wish, transition="switch", over=0) if isinstance(wish, PromptUpdate) else wish
        if produced.sink is not None:
            self.wishes["reference"], self.has_sink = Reference(latents=produced.sink), True


class StreamDriver:
    """One stream on the ranks, in a thread of its own. All its methods are for several threads.

    `run(course, on_event, on_start)` runs the stages, `courses` one after another: each ends where the next begins.
    `deliver` takes what comes out, under the lock of `changed`, which is notified of everything that happens.
    """

    def __init__(
        self,
        run: Run,
        courses: Sequence[StreamRun],
        limits: StreamLimits,
        track: AudioSource | None,
        deliver: Callable[[OutputBlock], object],
        changed: threading.Condition,
    ) -> None:
        self._course, *later = courses
        self._run, self._later, self._limits, self._track = run, deque(later), limits, track
        self._deliver, self._changed = deliver, changed
        self._credits = BlockCredits(limits.credit)
        self._wishes: dict[int, list[Update]] = {}
        self._sent: dict[int, tuple[BeginBlock, Tensor | None]] = {}  # until they come out
        self._standing = ResumeState()
        self._tell: Tell | None = None
        self._ready: int | None = None
        self._next = 0
        self._is_paused = self._is_stopping = False
        self.status: Status = "running"
        self.error: Exception | None = None
        self.figures: tuple[StageStats, ...] = ()
        self._thread = threading.Thread(target=self._drive, name="patchpar-stream", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end; whether it has come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def in_flight(self) -> int:
        """Blocks that have begun and have not reached the watcher."""
        return self._credits.in_flight

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come out."""
        return self.status in ("finished", "cancelled", "failed")

    # --- what the watcher does --------------------------------------------------------------------------------------

    def wish(self, wish: Update, at: int | None) -> int:
        """A change from block `at` on, or as soon as can be; the block. Raises PlanError if that block has begun."""
        with self._changed:
            block = self._next if at is None else at
            if block < self._next:
                raise PlanError(f"at={at}: block {at} has begun; the next that can change is {self._next}")
            self._wishes.setdefault(block, []).append(wish)
            return block

    def give_back(self, blocks: int = 1) -> None:
        """The watcher has taken away, or lost, so many blocks."""
        self._credits.give_back(blocks)
        self.look()

    def look(self) -> int:
        """Something has changed: perhaps the first rank can begin. Returns the next block before that."""
        with self._changed:
            block = self._next
            self._order()
            return block

    def pause(self, is_paused: bool) -> int:
        """Begin no further block, or begin again; the block that is held up."""
        with self._changed:
            self._is_paused = is_paused
            if self.status in ("running", "paused"):
                self.status = "paused" if is_paused else "running"
            return self.look()

    def stop(self) -> int:
        """Begin no further block, ever; what is under way comes out. Returns the block that will not begin."""
        with self._changed:
            self._is_stopping = True
            return self.look()

    def cancel(self) -> None:
        """Nothing more comes out, and the ranks compute nothing more than the step they are at."""
        with self._changed:
            if not self.is_over:
                self.status = "cancelled"
                self._tell_all()
            self._changed.notify_all()

    # --- what the ranks do ------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        course: StreamRun | None = self._course
        while course is not None:
            try:
                found = self._run(course, on_event=self._hear, on_start=self._begun)
            except Exception as error:  # noqa: BLE001  the watcher gets it
                with self._changed:
                    course = self._interrupted(error)
                    self._changed.notify_all()
                continue
            with self._changed:
                self.figures = tuple(figures for figures in found if isinstance(figures, StageStats))
                course = self._next_course()
                self._changed.notify_all()

    def _next_course(self) -> StreamRun | None:
        """After one has come to its end. Called under the lock."""
        self._tell = self._ready = None
        if self.status == "cancelled":
            return None
        if not self._later or self._is_stopping:
            self.status = "finished"
            return None
        self._course = self._later.popleft()
        self._standing.epoch += 1
        return self._course

    def _begun(self, tell: Tell) -> None:
        with self._changed:
            self._tell = tell
            if self.status == "cancelled":
                self._tell_all()

    def _tell_all(self) -> None:
        for rank in range(self._course.ranks):
            if self._tell is not None:
                self._tell(rank, CancelStream())

    def _hear(self, rank: int, event: Any) -> None:
        with self._changed:
            if isinstance(event, BlockReady):
                self._ready = event.block
                self._order()
            elif isinstance(event, ProducedBlock) and self.status != "cancelled":
                begun, samples = self._sent.pop(event.block)
                self._standing.note(event, begun)
                if self.status == "degraded":
                    self.status = "paused" if self._is_paused else "running"
                epoch = self._standing.epoch
                came = OutputBlock(produced=event, begun=begun, samples=samples, course=self._course, epoch=epoch)
                self._deliver(came)
            self._changed.notify_all()

    def _order(self) -> None:
        """Tell the first rank what to do, if it has asked and there is something to do. Called under the lock."""
        block = self._ready
        if block is None or self._tell is None or self._is_paused or self.is_over:
            return
        if block not in self._sent:
            if self._has_ended(block):
                self._ready = None
                self._tell(0, EndStream())
                return
            if not (self._track is None or self._track.is_here(block)) or not self._credits.take():
                return
            self._sent[block] = self._next_order(block)
        self._ready = None
        self._tell(0, self._sent[block][0])

    def _next_order(self, block: int) -> tuple[BeginBlock, Tensor | None]:
        tokens, samples = (None, None) if self._track is None else self._track.take(block)
        self._next = block + 1
        wishes = tuple(self._wishes.pop(block, ()))
        return BeginBlock(inputs=() if tokens is None else (tokens,), wishes=wishes), samples

    def _has_ended(self, block: int) -> bool:
        if self._is_stopping or block == self._limits.blocks:
            return True
        if self._later and block == self._later[0].first_block:
            return True
        return self._track is not None and self._track.is_over(block)

    def _interrupted(self, error: Exception) -> StreamRun | None:
        """What to go on with; None if the stream ends here. Called under the lock."""
        standing = self._standing
        self._tell = self._ready = None
        if self.status == "cancelled":
            return None
        if not isinstance(error, WorkerError) or standing.epoch >= self._limits.restarts:
            self.status, self.error = "failed", error
            return None
        standing.epoch += 1
        self.status = "degraded"
        again = tuple(standing.wishes.values())
        if standing.next_out in self._sent:
            begin, samples = self._sent[standing.next_out]
            self._sent[standing.next_out] = (replace(begin, wishes=(*again, *begin.wishes)), samples)
        else:
            self._wishes.setdefault(standing.next_out, [])[:0] = again
        adapts = self._course.adapt_sink and not standing.has_sink
        self._course = replace(self._course, first_block=standing.next_out, adapt_sink=adapts)
        return self._course
