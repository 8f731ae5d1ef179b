"""One request to every rank: all messages until each rank has answered, died, or is found to be stuck.

    caller                       ranks
      | -- CALL ----------------> |            to all
      | <------- EVENT ---------- |            any number, from any rank
      | -- MESSAGE ----------------> |            any number, to any rank
      | <-------- ASK ----------- |            from all; rank 0's question is used
      | -- REPLY ---------------> |            to all
      | -- PING -- / -- PONG ---- |            every second: is the process responsive?
      | <--- RESULT or FAILED --- |            one from each

Progress is a heartbeat (read from shared memory), an event, a question or an answer, or work without any of them: see
`hang_detection`. Time counts only while this process runs this loop, so that a suspended laptop or a slow callback
makes no rank late.
"""

import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from patchpar.launch.channel import ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.executor import Callbacks, IdleRank
from patchpar.launch.hang_detection import HangLimits, RankActivity, RequestProgress
from patchpar.launch.messages import EncodedMessage, decode, encode
from patchpar.launch.process import WorkerProcess
from patchpar.launch.remote_errors import RemoteError

TICK = 0.2  # s between reads of the heartbeats; frames are received at once
PING_EVERY = 1.0  # s, or a fifth of the patience if that is less
MISSED_PINGS = 2.5  # unanswered pings after which a rank is not merely busy
GRACE = 2.0  # s for the other ranks to finish after one has failed
LONGEST_STEP = 1.0  # s; a longer time between two ticks was not the workers' fault


@dataclass(slots=True, kw_only=True)
class RequestOutcome:
    """How a request ended. Of the ranks that neither answered nor died, `stuck` are those at fault."""

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

    def is_over(self, rank: int) -> bool:
        """Return whether a rank has answered or died."""
        return rank in self.results or rank in self.failures or rank in self.died

    @property
    def has_failed(self) -> bool:
        """Whether the request can no longer succeed."""
        return bool(self.failures or self.died or self.aborted)


class RequestLoop:
    """One request; `run` is called once."""

    def __init__(
        self, workers: Sequence[WorkerProcess], request: int, callbacks: Callbacks, *, limits: HangLimits
    ) -> None:
        self._workers, self._request, self._callbacks = workers, request, callbacks
        self._outcome = RequestOutcome()
        self._unanswered = [0.0] * len(workers)  # seconds since the last answer to a ping
        self._first = self._signs()
        self._progress = RequestProgress(limits, self._first)
        self._ping_every = self._until_ping = min(PING_EVERY, limits.patience / 5)
        self._ended: set[int] = set()

    def run(self, opening: ChannelFrame | None) -> RequestOutcome:
        """Send `opening`, if there is one, and receive until all ranks have answered or the request has failed.

        Raises what the caller's `on_event` raises, at once; the ranks are still running then.
        """
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
                if opening is not None:
                    self._send(worker, opening)
            self._callbacks.start(self._send_value)
            last = time.monotonic()
            while not self._is_finished():
                for key, _ in selector.select(TICK):
                    self._receive(selector, key.data)
                now = time.monotonic()
                self._pass_time(min(now - last, LONGEST_STEP))
                last = time.monotonic()
        self._record_states()
        return self._outcome

    def _record_states(self) -> None:
        """Record the state of every rank at the end."""
        outcome, limit = self._outcome, MISSED_PINGS * self._ping_every
        outcome.silent = [rank for rank, seconds in enumerate(self._unanswered) if seconds > limit]
        outcome.waiting = list(filter(self._progress.waits, self._active()))
        outcome.working = list(filter(self._progress.works, self._active()))
        signs = zip(self._signs(), self._first, strict=True)
        outcome.beats = {rank: sign.beats - first.beats for rank, (sign, first) in enumerate(signs)}

    def _signs(self) -> list[RankActivity]:
        return [worker.heartbeat.sign for worker in self._workers]

    def _active(self) -> list[int]:
        return [worker.rank for worker in self._workers if not self._outcome.is_over(worker.rank)]

    def _is_finished(self) -> bool:
        outcome = self._outcome
        active = self._active()
        if outcome.died or outcome.not_reading or not active:
            return True
        outcome.stuck = self._progress.stuck(active)
        return bool(outcome.stuck) or (outcome.has_failed and self._progress.quiet > GRACE)

    def _receive(self, selector: selectors.BaseSelector, worker: WorkerProcess) -> None:
        try:
            for frame in worker.channel.receive_ready():
                self._handle(worker, frame)
        except ChannelClosed:
            selector.unregister(worker.channel)
            self._died(worker)

    def _handle(self, worker: WorkerProcess, frame: ChannelFrame) -> None:
        if frame.kind is FrameKind.PONG:
            self._unanswered[worker.rank] = 0.0
        if frame.request != self._request or frame.kind is FrameKind.PONG:
            frame.message.close()  # of an earlier request that has failed
            return
        self._progress.count_message(worker.rank)
        if frame.kind is FrameKind.RESULT:
            self._outcome.results[worker.rank] = frame.message
            if frame.message.block is None and isinstance(decode(frame.message), IdleRank):
                self._outcome.bystanders.append(worker.rank)
            return
        value = decode(frame.message)
        frame.message.close()
        if frame.kind is FrameKind.FAILED:
            self._outcome.failures[worker.rank] = value
        elif frame.kind is FrameKind.EVENT and not self._outcome.has_failed:
            self._callbacks.event(worker.rank, value)
        elif frame.kind is FrameKind.ASK and worker.rank == 0:
            self._reply(value)

    def _reply(self, question: object) -> None:
        try:
            reply = encode((True, self._callbacks.answer(question)))
        except Exception as error:  # noqa: BLE001  the caller's own; raised when the ranks have unwound
            self._outcome.aborted = error
            reply = encode((False, f"{type(error).__name__} in the caller's on_ask: {error}"))
        for worker in self._workers:
            self._send(worker, ChannelFrame(FrameKind.REPLY, self._request, reply))
        reply.close()

    def _send_value(self, rank: int, value: object) -> None:
        """Send a value to a rank; thread-safe. A closed channel is ignored here, since `run` notices it."""
        message = encode(value)
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._workers[rank].channel.send(ChannelFrame(FrameKind.MESSAGE, self._request, message))
        message.close()

    def _pass_time(self, seconds: float) -> None:
        self._unanswered = [since + seconds for since in self._unanswered]
        self._progress.pass_time(seconds, self._signs())
        self._find_ended()
        self._until_ping -= seconds
        if self._until_ping <= 0:
            self._until_ping = self._ping_every
            for worker in self._workers:
                if not self._outcome.is_over(worker.rank):
                    self._send(worker, ChannelFrame(FrameKind.PING, self._request))

    def _find_ended(self) -> None:
        """Find dead workers: a channel closes with its process, but stays open while children of the worker run."""
        for worker in self._workers:
            if worker.rank in self._ended:  # found dead one tick ago, so that all its frames have been received since
                self._died(worker)
            elif not self._outcome.is_over(worker.rank) and not worker.is_alive():
                self._ended.add(worker.rank)

    def _died(self, worker: WorkerProcess) -> None:
        if worker.rank not in self._outcome.died:
            self._outcome.died.append(worker.rank)

    def _send(self, worker: WorkerProcess, frame: ChannelFrame) -> None:
        try:
            worker.channel.send(frame)
        except ChannelClosed:
            self._died(worker)
        except TimeoutError:
            self._outcome.not_reading.append(worker.rank)
