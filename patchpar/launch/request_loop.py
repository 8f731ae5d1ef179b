"""One request to some ranks: all messages until each of them has answered, died, or is found to be stuck.

    caller                       ranks
      | -- RANKS, CALL ---------> |            to all
      | <------- EVENT ---------- |            any number, from any rank
      | -- MESSAGE ----------------> |            any number, to any rank
      | <-------- ASK ----------- |            from all; the first rank's question is used
      | -- REPLY ---------------> |            to all
      | -- PING -- / -- PONG ---- |            every second: is the process responsive?
      | <--- RESULT or FAILED --- |            one from each
      | -- HOLD, HALT / - HELD -- |            to end it where all ranks can: see `pause_points`
      | -- ABORT ---------------> |            to those that are left when one is lost: no rank waits for another

Progress is a heartbeat (read from shared memory), an event, a question or an answer, a part of a long one of these, or
work without any of them: see `hang_detection`. Time counts only while this process runs this loop, so that a suspended
laptop or a slow callback makes no rank late.
"""

import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from patchpar.launch.channel import ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.executor import Callbacks, IdleRank
from patchpar.launch.hang_detection import HangLimits, RankActivity, RequestProgress
from patchpar.launch.messages import EncodedMessage, decode, encode
from patchpar.launch.rank_process import RankProcess
from patchpar.launch.remote_errors import RemoteError

TICK = 0.2  # s between reads of the heartbeats; frames are received at once
PING_EVERY = 1.0  # s, or a fifth of the patience if that is less
MISSED_PINGS = 2.5  # unanswered pings after which a rank is not merely busy
GRACE = 2.0  # s for the other ranks to finish after one has failed
UNWIND_SECONDS = 10.0  # for ranks to answer after ABORT: those that compute notice it at their next exchange
LONGEST_STEP = 1.0  # s; a longer time between two ticks was not the workers' fault
PART = 1 << 16  # bytes: no answer to a ping has as many, so that these are of a message that comes slowly


@dataclass(slots=True, kw_only=True)
class RequestOutcome:
    """How a request ended. Of the ranks that neither answered nor died, `stuck` are those at fault.

    `unwound`: those that have answered an ABORT, which says nothing about the cause.
    """

    results: dict[int, EncodedMessage] = field(default_factory=dict)
    failures: dict[int, RemoteError] = field(default_factory=dict)  # in order of arrival
    died: list[int] = field(default_factory=list)
    not_reading: list[int] = field(default_factory=list)  # do not read, so that nothing can be sent to them
    silent: list[int] = field(default_factory=list)  # have not answered the last pings
    stuck: list[int] = field(default_factory=list)  # made no progress; all unfinished ranks if each waited for another
    waiting: list[int] = field(default_factory=list)  # for another rank, at the end
    working: list[int] = field(default_factory=list)  # used the processor until the end
    beats: dict[int, int] = field(default_factory=dict)  # heartbeats during the request
    bystanders: list[int] = field(default_factory=list)  # returned without taking part
    aborted: Exception | None = None  # what the caller's on_ask raised
    held: dict[int, int] = field(default_factory=dict)  # pause points that each rank had passed, if it is cancelled
    unwound: list[int] = field(default_factory=list)
    unbegun: list[int] = field(default_factory=list)  # had not begun the request at its end
    has_sent: bool = False  # whether the caller has sent a value to a rank

    def is_over(self, rank: int) -> bool:
        """Return whether a rank has answered or died."""
        return rank in self.results or rank in self.failures or rank in self.died

    @property
    def has_failed(self) -> bool:
        """Whether the request can no longer succeed."""
        return bool(self.failures or self.died or self.aborted)

    def is_untouched(self, ranks: Sequence[int]) -> bool:
        """Return whether nothing has come of the request, so that it can be made again on other workers."""
        return not self.has_sent and set(self.unbegun) == {*ranks}


class RequestLoop:
    """One request to `workers`, of which the first one's questions are answered; `run` is called once.

    `unwinds`: when the request has failed, ranks that are left get time to end it, so that they can be used again.
    """

    def __init__(
        self,
        workers: Sequence[RankProcess],
        request: int,
        callbacks: Callbacks,
        *,
        limits: HangLimits,
        unwinds: bool = False,
    ) -> None:
        self._workers, self._request, self._callbacks = {each.rank: each for each in workers}, request, callbacks
        self._first_rank, self._unwinds = workers[0].rank, unwinds
        self._outcome = RequestOutcome()
        self._unanswered = dict.fromkeys(self._workers, 0.0)  # seconds since the last answer to a ping
        self._first = self._signs()
        self._progress = RequestProgress(limits, self._first)
        self._ping_every = self._until_ping = min(PING_EVERY, limits.patience / 5)
        self._ended: set[int] = set()
        self._unwinding: float | None = None  # seconds since the ABORT
        self._is_held = self._is_halted = False

    def run(self, opening: Sequence[ChannelFrame]) -> RequestOutcome:
        """Send the frames of `opening`, and receive until all ranks have answered or the request has failed.

        Raises what the caller's `on_event` raises, at once; the ranks are still running then.
        """
        with selectors.DefaultSelector() as selector:
            for worker in self._workers.values():
                try:
                    selector.register(worker.channel, selectors.EVENT_READ, worker)
                except ValueError:  # another thread has ended the worker, and closed the channel
                    self._died(worker)
                    continue
                for frame in opening:
                    self._send(worker, frame)
            self._callbacks.start(self._send_value)
            last = time.monotonic()
            while not self._is_finished():
                for key, _ in selector.select(TICK):
                    self._receive(selector, key.data)
                now = time.monotonic()
                self._pass_time(min(now - last, LONGEST_STEP))
                last = time.monotonic()
        self._outcome.unbegun = [each.rank for each in self._workers.values() if not self._has_begun(each)]
        return self._outcome

    def _has_begun(self, worker: RankProcess) -> bool:
        return worker.heartbeat.has_begun(self._request)

    def _record_states(self) -> None:
        """Record the state of every rank at the end."""
        outcome, limit = self._outcome, MISSED_PINGS * self._ping_every
        outcome.silent = [rank for rank, seconds in self._unanswered.items() if seconds > limit]
        outcome.waiting = list(filter(self._progress.waits, self._active()))
        outcome.working = list(filter(self._progress.works, self._active()))
        outcome.beats = {rank: sign.beats - self._first[rank].beats for rank, sign in self._signs().items()}

    def _signs(self) -> dict[int, RankActivity]:
        return {rank: worker.heartbeat.sign for rank, worker in self._workers.items()}

    def _active(self) -> list[int]:
        return [rank for rank in self._workers if not self._outcome.is_over(rank)]

    def _is_finished(self) -> bool:
        outcome = self._outcome
        if self._unwinding is not None:
            return self._unwinding > UNWIND_SECONDS or not self._left()
        active = self._active()
        if active and not outcome.died and not outcome.not_reading:
            outcome.stuck = self._stuck(active)
            if not outcome.stuck and not (outcome.has_failed and self._progress.quiet > GRACE):
                return False
        self._record_states()
        return not self._begins_to_unwind()

    def _stuck(self, active: Sequence[int]) -> list[int]:
        """Return the stuck ones of the `active` ranks: not those that wait for one that has failed, and can unwind."""
        found = self._progress.stuck(active)
        unwind = self._unwinds and self._outcome.has_failed
        return [rank for rank in found if not (unwind and self._progress.waits(rank))]

    def _left(self) -> list[int]:
        """Return the ranks that have still to answer the ABORT."""
        outcome = self._outcome
        gone = {*outcome.stuck, *outcome.not_reading, *outcome.unwound}
        return [rank for rank in self._active() if rank not in gone]

    def _begins_to_unwind(self) -> bool:
        """Tell the ranks that are left to end the request, if there are any that may do so."""
        if not self._unwinds or not self._left():
            return False
        self._unwinding, message = 0.0, encode(tuple(self._workers))
        for rank in self._left():
            self._send(self._workers[rank], ChannelFrame(FrameKind.ABORT, self._request, message))
        return bool(self._left())

    def _receive(self, selector: selectors.BaseSelector, worker: RankProcess) -> None:
        before = worker.channel.pending
        try:
            for frame in worker.channel.receive_ready():
                self._handle(worker, frame)
            if worker.channel.pending > max(before, PART):
                self._unanswered[worker.rank] = 0.0
                self._progress.count_message(worker.rank)
        except ChannelClosed:
            selector.unregister(worker.channel)
            self._died(worker)

    def _handle(self, worker: RankProcess, frame: ChannelFrame) -> None:
        if frame.kind is FrameKind.PONG:
            self._unanswered[worker.rank] = 0.0
        if frame.request != self._request or frame.kind is FrameKind.PONG:
            frame.message.close()  # of an earlier request that has failed
            return
        self._progress.count_message(worker.rank)
        if self._unwinding is not None:
            frame.message.close()
            if frame.kind in (FrameKind.RESULT, FrameKind.FAILED):
                self._outcome.unwound.append(worker.rank)
        elif frame.kind is FrameKind.RESULT:
            self._outcome.results[worker.rank] = frame.message
            if frame.message.block is None and isinstance(decode(frame.message), IdleRank):
                self._outcome.bystanders.append(worker.rank)
        else:
            value = decode(frame.message)
            frame.message.close()
            self._handle_value(worker, frame.kind, value)

    def _handle_value(self, worker: RankProcess, kind: FrameKind, value: Any) -> None:
        if kind is FrameKind.FAILED:
            self._outcome.failures[worker.rank] = value
        elif kind is FrameKind.EVENT and (self._is_held or not self._outcome.has_failed):
            # Ranks that are held end the call one after another: one that is behind is still to send its events.
            self._callbacks.event(worker.rank, value)
        elif kind is FrameKind.HELD:
            self._outcome.held[worker.rank] = value
        elif kind is FrameKind.ASK and worker.rank == self._first_rank:
            self._reply(value)

    def _hold(self) -> None:
        """Begin to cancel the request."""
        self._is_held = True
        for rank in self._active():
            self._send(self._workers[rank], ChannelFrame(FrameKind.HOLD, self._request))

    def _halt(self) -> None:
        """End the request where the rank is that is furthest, as soon as all have said where they are."""
        held = self._outcome.held
        if not self._is_halted and held and all(rank in held for rank in self._active()):
            self._is_halted = True
            number = encode(None if self._outcome.results else max(held.values()))  # None: one has passed all
            for rank in self._active():
                self._send(self._workers[rank], ChannelFrame(FrameKind.HALT, self._request, number))

    def _reply(self, question: object) -> None:
        try:
            reply = encode((True, self._callbacks.answer(question)))
        except Exception as error:  # noqa: BLE001  the caller's own; raised when the ranks have unwound
            self._outcome.aborted = error
            reply = encode((False, f"{type(error).__name__} in the caller's on_ask: {error}"))
        for worker in self._workers.values():
            self._send(worker, ChannelFrame(FrameKind.REPLY, self._request, reply))
        reply.close()

    def _send_value(self, rank: int, value: object) -> None:
        """Send a value to a rank; thread-safe. A closed channel is ignored here, since `run` notices it."""
        message = encode(value)
        self._outcome.has_sent = True
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._workers[rank].channel.send(ChannelFrame(FrameKind.MESSAGE, self._request, message))
        message.close()

    def _pass_time(self, seconds: float) -> None:
        if self._unwinding is not None:
            self._unwinding += seconds
        self._unanswered = {rank: since + seconds for rank, since in self._unanswered.items()}
        self._progress.pass_time(seconds, self._signs())
        self._find_ended()
        if self._is_held:
            self._halt()
        elif self._callbacks.is_cancelled():
            self._hold()
        self._until_ping -= seconds
        if self._until_ping <= 0:
            self._until_ping = self._ping_every
            for rank in self._active():
                self._send(self._workers[rank], ChannelFrame(FrameKind.PING, self._request))

    def _find_ended(self) -> None:
        """Find dead workers: a channel closes with its process, but stays open while children of the worker run."""
        for rank, worker in self._workers.items():
            if self._outcome.is_over(rank):
                continue
            if rank in self._ended:  # found dead one tick ago, so that all its frames have been received since
                self._died(worker)
            elif not worker.is_alive():
                self._ended.add(rank)

    def _died(self, worker: RankProcess) -> None:
        if worker.rank not in self._outcome.died:
            self._outcome.died.append(worker.rank)

    def _send(self, worker: RankProcess, frame: ChannelFrame) -> None:
        try:
            worker.channel.send(frame)
        except ChannelClosed:
            self._died(worker)
        except TimeoutError:
            self._outcome.not_reading.append(worker.rank)
