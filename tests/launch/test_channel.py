"""A frame that the other end does not read: waited for while that process works, and given up when it does not."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.launch import process as process_module
from patchpar.launch import worker as worker_module
from patchpar.launch.channel import Channel, ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.descriptors import receive_with_descriptors
from patchpar.launch.executor import CallAborted
from patchpar.launch.messages import EncodedMessage, encode
from patchpar.launch.process import ProcessWork
from patchpar.launch.worker import Worker, WorkerContext

LARGE = EncodedMessage(stream=os.urandom(4 << 20))  # more than the buffers of a socket hold


@pytest.fixture
def ends() -> Iterator[tuple[Callable[..., Channel], Channel]]:
    ours, theirs = socket.socketpair()
    yield lambda **limits: Channel(ours, send_timeout=0.1, **limits), Channel(theirs)
    ours.close()
    theirs.close()


def test_an_end_that_works_is_waited_for(ends: tuple[Callable[..., Channel], Channel]) -> None:
    make, reader = ends
    looks, found, may_read = [0], list[Any](), threading.Event()

    def is_working() -> bool:
        looks[0] += 1
        if looks[0] == 30:  # three times as often as an idle end would be asked
            may_read.set()
        return not may_read.is_set()

    thread = threading.Thread(target=lambda: may_read.wait(20) and found.append(reader.receive()))
    thread.start()
    make(is_working=is_working).send(ChannelFrame(FrameKind.CALL, 1, LARGE))
    thread.join(20)
    assert looks[0] >= 30
    assert found[0].message.stream == LARGE.stream


@pytest.mark.parametrize("limits", [{}, {"is_working": lambda: True, "longest": 0.2}], ids=["idle", "works for ever"])
def test_an_end_that_never_reads_is_given_up(ends: tuple[Callable[..., Channel], Channel], limits: Any) -> None:
    make, _ = ends
    with pytest.raises(TimeoutError):
        make(**limits).send(ChannelFrame(FrameKind.CALL, 1, LARGE))


def test_a_process_has_worked_if_its_processor_time_has_grown(tmp_path: Path) -> None:
    code = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'end')!r}).exists(): pass\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        work = ProcessWork()
        work.process = SimpleNamespace(pid=process.pid)  # type: ignore[assignment]
        has_worked = work.has_grown
        while not has_worked():
            time.sleep(0.05)
        (tmp_path / "end").touch()
        while has_worked():
            time.sleep(0.1)
        assert not has_worked(), "it sleeps"
        process.kill()


@pytest.mark.parametrize(("state", "is_working"), [("R", True), ("D", True), ("S", False), ("T", False), ("Z", False)])
def test_a_process_that_waits_for_a_core_has_work(
    state: str, is_working: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it uses none of the processor's time meanwhile; one that sleeps or is stopped does not work."""
    folder = tmp_path / "77"
    folder.mkdir()
    (folder / "stat").write_text(f"77 (a ) S 1) {state} " + " ".join(["0"] * 10) + " 3 4 0 0")
    monkeypatch.setattr(process_module, "Path", lambda path: tmp_path / path.removeprefix("/proc/"))
    work = ProcessWork()
    work.process = SimpleNamespace(pid=77)  # type: ignore[assignment]
    assert work.has_grown(), "7 ticks, of which nothing was known"
    assert work.has_grown() == is_working


def test_after_a_frame_that_was_read_in_part_no_other_follows() -> None:
    """It would be read as the rest of that frame, and what then comes as anything at all."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours, send_timeout=0.1)
        with pytest.raises(TimeoutError):
            channel.send(ChannelFrame(FrameKind.MESSAGE, 1, LARGE))
        theirs.setblocking(False)
        while select.select([theirs], [], [], 0)[0]:
            theirs.recv(1 << 20)
        with pytest.raises(TimeoutError, match="earlier message"):
            channel.send(ChannelFrame(FrameKind.PING, 1))
        assert not select.select([theirs], [], [], 0)[0]
        channel.close()


def test_an_end_that_is_closed_is_so_for_every_frame() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, send_timeout=0.1)
    theirs.close()
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            channel.send(ChannelFrame(FrameKind.PING, 1))
    channel.close()


def test_an_end_from_which_nothing_has_come_after_all_is_not_closed() -> None:
    """The system may say that there is something to read where there is nothing."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, send_timeout=0.1)
    assert list(channel.receive_ready()) == []
    Channel(theirs).send(ChannelFrame(FrameKind.PONG, 1))
    assert [frame.kind for frame in channel.receive_ready()] == [FrameKind.PONG]
    channel.close()
    theirs.close()


def test_the_block_of_a_frame_of_which_a_part_has_come_is_freed() -> None:
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as file:
        channel = Channel(ours)
        socket.send_fds(theirs, [b"half"], [file.fileno()])
        assert list(channel.receive_ready()) == []
        (descriptor,) = channel._descriptors
        channel.close()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


def test_a_block_for_which_there_is_no_descriptor_left_is_not_another_ones() -> None:
    """The system drops a descriptor then: the next frame's would be taken for it."""
    resource = pytest.importorskip("resource")
    ours, theirs = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with theirs, tempfile.TemporaryFile() as file:
        channel = Channel(ours)
        socket.send_fds(theirs, [b"frame"], [file.fileno()])
        free = os.dup(file.fileno())
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            with pytest.raises(OSError, match="ulimit"):
                list(channel.receive_ready())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        channel.close()


def test_descriptors_that_came_before_one_for_which_there_is_none_left_are_closed() -> None:
    resource = pytest.importorskip("resource")
    ours, theirs = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs, tempfile.TemporaryFile() as file:
        socket.send_fds(theirs, [b"frame"], [file.fileno()] * 2)
        free = os.dup(file.fileno())
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
            with pytest.raises(OSError, match="ulimit"):
                receive_with_descriptors(ours, 5, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(free)


def test_a_descriptor_that_came_is_not_handed_on_to_other_programs() -> None:
    """A program that a worker starts would keep a link to a dead rank open, or hold an image in memory."""
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        socket.send_fds(theirs, [b"frame"], [file.fileno()])
        _, (descriptor,) = receive_with_descriptors(ours, 5, 1)
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def worker_on(end: socket.socket) -> Worker:
    config: Any = SimpleNamespace(rank=0, world_size=1, device="cpu", deadline=1.0, session_key=b"")
    heartbeat: Any = SimpleNamespace(beat=None, waiting=contextlib.nullcontext(), show_work=lambda: None)
    channel = Channel(end)
    return Worker(channel, config, WorkerContext(config, channel, heartbeat))


def test_a_worker_passes_over_what_was_for_an_earlier_call() -> None:
    """A reply, the end of a call, and a message: they may come when the call that they were for has failed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        context = worker_on(theirs)._context
        context.request = 2
        for request in (1, 2):
            context.replies.put(ChannelFrame(FrameKind.REPLY, request, encode((True, request))))
            context.messages.put(ChannelFrame(FrameKind.MESSAGE, request, encode(request)))
        assert context.ask("what") == 2
        assert [context.receive(0.0), context.receive(0.0), context.receive(0.0)] == [2, None, None]
        context.request = 3
        context.abort(ChannelFrame(FrameKind.ABORT, 2, encode([])))
        context.replies.put(ChannelFrame(FrameKind.REPLY, 3, encode((True, "again"))))
        assert context.ask("what") == "again"
        context.abort(ChannelFrame(FrameKind.ABORT, 3, encode([])))
        with pytest.raises(CallAborted, match="has failed on a rank"):
            context.ask("what")


def test_a_worker_s_look_at_messages_ends() -> None:
    """With Python 3.10 a SimpleQueue waited for ever once in some thousand first looks without a time to wait."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(10_000):
            assert worker_on(theirs)._context.receive(0.0) is None


@pytest.mark.parametrize("kind", [FrameKind.PING, FrameKind.HOLD])
def test_a_worker_reads_on_while_its_caller_does_not(kind: FrameKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may be about to send more than the buffers hold: each would wait for the other to read."""
    monkeypatch.setattr(worker_module.os, "_exit", lambda code: None)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    for size in (1 << 16, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                theirs.send(bytes(size))
    theirs.setblocking(True)
    worker, caller = worker_on(theirs), Channel(ours)
    threads = [threading.Thread(target=each) for each in (worker._read, worker._send_answers)]
    for thread in threads:
        thread.start()
    caller.send(ChannelFrame(kind, 1))
    caller.send(ChannelFrame(FrameKind.CALL, 2))
    try:
        assert worker._calls.get(timeout=20).request == 2
    finally:
        caller.close()
        worker._context.answers.put(ChannelFrame(FrameKind.PONG, 3))
        for thread in threads:
            thread.join(20)
        theirs.close()


def test_a_worker_whose_reader_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(worker_module.os, "_exit", codes.append)
    ours, theirs = socket.socketpair()
    Channel(ours).send(ChannelFrame(FrameKind.LINK, 0, EncodedMessage(stream=b"no descriptor")))
    worker = worker_on(theirs)
    with contextlib.suppress(AssertionError):
        worker._read()
    assert codes == [1]
    assert "Traceback" in capsys.readouterr().err
    ours.close()
    worker._read()
    assert codes == [1, 0], "its caller has ended"
    assert capsys.readouterr().err == ""
    theirs.close()
