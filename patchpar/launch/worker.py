"""The main program of a worker process: reads calls from its channel, runs them on its engine, sends results.

    reader thread   frames from the channel: takes links to other ranks, and shuts those of a call that the caller ends;
                    ends the process at end of file. It never waits for the caller to read: caller and worker would
                    wait for each other
    answer thread   answers of the reader thread, to pings, also while a call runs, and to what cancels a call
    main thread     calls, one after another

A worker never outlives the process that started it: the reader thread ends it when the channel closes, and the kernel
does if the interpreter itself is stuck (see `die_with_parent`).
"""

import contextlib
import faulthandler
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from patchpar.errors import LaunchError
from patchpar.launch.accelerators import default_backend, kind_of, random_width, select_device
from patchpar.launch.channel import Channel, ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.default_group import GroupRank, form_group, store_at
from patchpar.launch.engines import engine_method, load_engine
from patchpar.launch.executor import CallAborted
from patchpar.launch.handshake import WorkerConfig, versions
from patchpar.launch.heartbeat import Heartbeat
from patchpar.launch.links import PeerLink, RankLink
from patchpar.launch.message_seal import MessageSeal
from patchpar.launch.messages import EncodedMessage, decode, encode
from patchpar.launch.pause_points import PausePoints
from patchpar.launch.remote_errors import take_down
from patchpar.launch.time_limit import longest_wait
from patchpar.launch.worker_torch import prepare_torch


def main(fd: int) -> None:
    """Serve the channel at descriptor `fd` until a STOP frame or end of file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starting process handles ctrl-C
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    channel = Channel(socket.socket(fileno=fd))
    os.set_inheritable(fd, False)
    try:
        first = channel.receive()
    except ChannelClosed:
        return
    config: WorkerConfig = decode(first.message)
    inherited = config.inherited
    assert inherited is not None, "the caller is on this host"
    die_with_parent(inherited.lifeline)
    sys.path[:] = inherited.path
    Worker(channel, config, WorkerContext(config, channel, Heartbeat(inherited.heartbeat))).run(first.request)


def exit_at_once(code: int) -> None:
    """Print what is left to print and end this process, without what Python does at its end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def die_with_parent(lifeline: int) -> None:
    """Make the kernel kill this process group when the other end of the pipe closes, whatever this process is doing.

    A worker leads a process group, so that processes that it has started are killed too. PR_SET_PDEATHSIG would act
    when the parent *thread* ends. Linux only; elsewhere there is only the reader thread.
    """
    import fcntl  # Windows has none, and imports this module for its names

    set_signal = getattr(fcntl, "F_SETSIG", None)
    if set_signal is not None:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, set_signal, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)


class WorkerContext:
    """The RankContext of a worker."""

    def __init__(self, config: WorkerConfig, channel: Channel, heartbeat: Heartbeat) -> None:
        self.rank, self.world_size, self.device = config.rank, config.world_size, config.device
        self.deadline = config.deadline
        self.seal = MessageSeal(config.session_key, config.rank) if config.session_key else None
        self.ranks = tuple(range(config.world_size))
        self.links: dict[int, RankLink] = {}
        self.heartbeat = heartbeat
        self.beat: Callable[[str], None] = self.heartbeat.beat
        self.waiting = self.heartbeat.waiting
        self.request = 0
        self.aborted: int | None = None  # the latest request that the caller has ended
        self.pause_points = PausePoints(self.waiting)
        self.replies: queue.SimpleQueue[ChannelFrame] = queue.SimpleQueue()
        self.messages: queue.Queue[ChannelFrame] = queue.Queue()  # see InlineContext.receive
        self.answers: queue.SimpleQueue[ChannelFrame] = queue.SimpleQueue()  # of the reader thread
        self.store_listener: socket.socket | None = None  # of the store of a default group, if this rank has opened it
        self._channel = channel

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def wait_limit(self) -> float:
        """See RankContext. Only the caller sees which rank is at fault, so that it has to detect a hang first."""
        return longest_wait(self.deadline)

    def emit(self, event: object) -> None:
        self._send(FrameKind.EVENT, event)

    def ask(self, question: object) -> Any:
        self._send(FrameKind.ASK, question if self.is_first else None)
        with self.waiting:  # without a limit: the caller may take its time, and this process ends with it
            reply = self.replies.get()
            while reply.request != self.request:
                reply = self.replies.get()
        answered, value = decode(reply.message)
        if not answered:
            raise CallAborted(str(value))
        return value

    def receive(self, timeout: float) -> Any:
        give_up = time.monotonic() + timeout
        while True:
            try:
                with self.waiting:
                    frame = self.messages.get(timeout=max(0.0, give_up - time.monotonic()))
            except queue.Empty:
                return None
            value = decode(frame.message) if frame.request == self.request else None  # else of an earlier call
            frame.message.close()
            if frame.request == self.request:
                return value

    def pause_point(self) -> None:
        self.pause_points.passes()

    def link(self, frame: ChannelFrame) -> None:
        """Take a link to another rank, in place of an earlier one. From the reader thread, as `abort`."""
        link = self._link_of(frame.message)
        before, self.links[link.peer] = self.links.get(link.peer), link
        frame.message.close()
        if before is not None:
            before.shut()
            before.close()

    def _link_of(self, message: EncodedMessage) -> RankLink:
        """Return the link of a LINK frame: of a rank, and the descriptor of a socket."""
        assert message.block is not None
        end = socket.socket(fileno=os.dup(message.block.fd))
        return PeerLink(self.rank, decode(EncodedMessage(stream=message.stream)), end)

    def abort(self, frame: ChannelFrame) -> None:
        """End all waits of a request for the ranks in `frame`, and for the caller."""
        self.aborted = frame.request
        for rank in decode(frame.message):
            if rank in self.links:
                self.links[rank].shut()
        self.replies.put(ChannelFrame(FrameKind.REPLY, frame.request, encode((False, "the call has failed on a rank"))))
        self.pause_points.release(frame.request)

    def hold(self, frame: ChannelFrame) -> None:
        """Hold a request at its next pause point, and say how many it has passed."""
        passed = encode(self.pause_points.hold(frame.request))
        self.answers.put(ChannelFrame(FrameKind.HELD, frame.request, passed))

    def halt(self, frame: ChannelFrame) -> None:
        """End a request at a pause point."""
        self.pause_points.halt(frame.request, decode(frame.message))

    def _send(self, kind: FrameKind, value: object) -> None:
        message = _encode("an event" if kind is FrameKind.EVENT else "a question", value)
        self._channel.send(ChannelFrame(kind, self.request, message))
        message.close()


def _encode(what: str, value: object) -> EncodedMessage:
    """Encode a message for the caller. Raises TypeError that names what cannot be sent."""
    try:
        return encode(value)
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(f"{what} (a {type(value).__name__}) cannot be sent to the caller: {error}") from error


class Worker:
    """One rank."""

    def __init__(self, channel: Channel, config: WorkerConfig, context: WorkerContext) -> None:
        self._channel, self._config, self._context = channel, config, context
        self._calls: queue.SimpleQueue[ChannelFrame] = queue.SimpleQueue()
        self._engine: Any = None

    def run(self, first_request: int) -> None:
        """Answer the WorkerConfig, then every call."""
        for target, name in ((self._read, "patchpar-reader"), (self._send_answers, "patchpar-answers")):
            threading.Thread(target=target, name=name, daemon=True).start()
        self._answer(first_request, self._prepare)
        while True:
            frame = self._calls.get()
            if frame.kind is FrameKind.RANKS:  # of the call that follows
                self._context.ranks = decode(frame.message)
                continue
            work = self._form if frame.kind is FrameKind.FORM else lambda frame=frame: self._call(frame)
            self._answer(frame.request, work)
            del frame, work  # else the arguments would stay in memory until the next call

    def _read(self) -> None:
        context = self._context
        takes: dict[FrameKind, Callable[[ChannelFrame], object]] = {
            FrameKind.PING: self._pong,
            FrameKind.REPLY: context.replies.put,
            FrameKind.MESSAGE: context.messages.put,
            FrameKind.LINK: context.link,
            FrameKind.ABORT: context.abort,
            FrameKind.HOLD: context.hold,
            FrameKind.HALT: context.halt,
        }
        code = 0
        try:
            while (frame := self._channel.receive()).kind is not FrameKind.STOP:
                takes.get(frame.kind, self._calls.put)(frame)
        except ChannelClosed:  # the caller has ended
            pass
        except BaseException:  # noqa: BLE001  the caller shows the last output of a worker that has ended
            code = 1
            traceback.print_exc()
        finally:
            exit_at_once(code)  # the main thread may be inside any call, and there is nothing to clean up

    def _pong(self, frame: ChannelFrame) -> None:
        self._context.heartbeat.show_work()
        self._context.answers.put(ChannelFrame(FrameKind.PONG, frame.request))

    def _send_answers(self) -> None:
        with contextlib.suppress(ChannelClosed):  # which ends the process, in the reader thread
            while True:
                self._channel.send(self._context.answers.get())

    def _answer(self, request: int, work: Callable[[], object]) -> None:
        self._context.request = request
        self._context.heartbeat.begin(request)
        self._context.pause_points.begin(request)
        try:
            kind, message = FrameKind.RESULT, _encode("what it returned", work())
        except BaseException as error:  # noqa: BLE001  also SystemExit: the caller must get any of them
            # A caller that has ended the request does not read why; a trace reads many files, and others wait for it.
            is_read = self._context.aborted != request
            kind, message = FrameKind.FAILED, encode(take_down(error) if is_read else None)
        self._channel.send(ChannelFrame(kind, request, message))
        message.close()

    def _prepare(self) -> dict[str, str]:
        """Import the slow modules. Returns the versions that have to be equal on all ranks."""
        load_engine(self._config.engine)
        for name in self._config.preload:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise LaunchError(f"cannot import {name!r} of preload: {error}") from error
        facts = {**versions(), "engine": self._config.engine}
        if self._config.world_size > 1 or "torch" in sys.modules:  # a single engine may not need torch
            facts["torch"] = prepare_torch(self._config.threads)
        return facts

    def _form(self) -> int:
        """Create the engine, after the default group if every rank has its own GPU. Returns its `random_width`."""
        select_device(self._config.device)
        if self._config.group_store is not None:
            _join_group(self._config, self._config.group_store, self._context.store_listener)
        self._engine = load_engine(self._config.engine)(self._context)
        return random_width(self._config.device)

    def _call(self, frame: ChannelFrame) -> object:
        method, args, kwargs, expected = decode(frame.message)
        frame.message.close()
        self._context.deadline = self._config.deadline + expected
        return engine_method(self._engine, method)(*args, **kwargs)


def _join_group(config: WorkerConfig, where: str, listener: socket.socket | None) -> None:
    own = GroupRank(
        rank=config.rank,
        world_size=config.world_size,
        device=config.device,
        deadline=config.start_timeout,
        timeout=config.group_timeout,
    )
    store = store_at(where, own, listener if own.rank == 0 else None)
    form_group(default_backend(kind_of(config.device)), store, own)
