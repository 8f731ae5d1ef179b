"""Messages between ranks: all kinds of tensors, in order, however many; and what is said when they do not come."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, arena, peer_socket, torch_groups
from patchpar.comm.transport.packing import pack
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.comm.transport.torch_groups import ProcessGroups
from patchpar.errors import ExchangeError
from patchpar.launch.time_limit import longest_wait
from tests.breadth import first_of
from tests.unit.threads import connected, on_threads

ON_RANKS = "tests.unit.on_ranks"
BOTH = pytest.mark.parametrize("through", ["shared_memory", "torch"])


@BOTH
def test_every_kind_of_tensor(ranks: Any, through: str) -> None:
    assert ranks.run(f"{ON_RANKS}:kinds", 3, through=through) == [[]] * 3


@BOTH
def test_a_hundred_messages_before_anybody_reads(ranks: Any, through: str) -> None:
    assert ranks.run(f"{ON_RANKS}:many_unread", 3, 100, 40, through=through) == [True] * 3


def test_more_doorbells_than_a_socket_holds(ranks: Any) -> None:
    """Both sides are stuck in sending, and each must read to let the other go on."""
    assert ranks.run(f"{ON_RANKS}:many_unread", 2, 2000, 1, through="shared_memory") == [True] * 2


@BOTH
def test_a_large_message(ranks: Any, through: str) -> None:
    assert ranks.run(f"{ON_RANKS}:large", 2, through=through) == [True] * 2


@BOTH
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
def test_exchanges_may_be_awaited_in_any_order(ranks: Any, through: str, order: list[int]) -> None:
    assert ranks.run(f"{ON_RANKS}:any_order", 3, order, through=through) == [[True] * 8] * 3


def test_the_word_of_a_peer_that_is_gone_is_not_awaited() -> None:
    def run(transport: SharedMemoryTransport) -> Any:
        if transport.rank:
            return transport.close()
        return transport.send_recv([], [Incoming(1, (TensorSpec((3,), torch.float32),))], "conv_in").wait_for(0)

    error, _ = on_threads(2, run)
    assert isinstance(error, ExchangeError)
    assert "rank 1 is gone" in str(error)


@BOTH
def test_values_are_put_where_they_are_wanted(ranks: Any, through: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:put_where_wanted", 3, through=through):
        assert all(found.values()), found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("through", first_of(["shared_memory", "torch"], "shared_memory"))
def test_two_thousand_messages_leave_nothing_behind(ranks: Any, through: str) -> None:
    for grown in ranks.run(f"{ON_RANKS}:grown", 2, 2000, through=through):
        assert grown["descriptors"] <= 0, grown
        assert grown["bytes"] < 8 << 20, grown


def send_recv(transport: SharedMemoryTransport, rows: int, expected: int) -> Any:
    peer = 1 - transport.rank
    spec = TensorSpec((expected, 3), torch.float32)
    message = Outgoing((peer,), (torch.zeros(rows, 3),))
    return transport.send_recv([message], [Incoming(peer, (spec,))], "conv_in").wait()


def test_a_message_of_another_size_names_rank_peer_exchange_point_and_shapes() -> None:
    first, second = on_threads(2, lambda transport: send_recv(transport, 4 + transport.rank, 4))
    assert isinstance(first, ExchangeError)
    assert re.match(
        r"rank 0 at conv_in: rank 1 sent 60 bytes, but 48 were expected for \(4, 3\) torch.float32", str(first)
    )
    assert second[0][0].shape == (4, 3)


def test_after_a_message_of_another_size_nothing_is_exchanged() -> None:
    """What comes next may belong to another exchange, too."""

    def run(transport: SharedMemoryTransport) -> str:
        with contextlib.suppress(ExchangeError):
            send_recv(transport, 4 + transport.rank, 4)
        if transport.rank:
            return ""
        with pytest.raises(ExchangeError) as caught:
            transport.send_recv([], [], "conv_out")
        return str(caught.value)

    message, _ = on_threads(2, run)
    assert re.match("rank 0 at conv_out: the ranks' connection is not used again.*rank 1 sent 60 bytes", message)


def test_a_rank_that_waits_for_another_reads_what_others_send() -> None:
    """Else rank 2 would be stuck in sending to it, and rank 1, for which it waits, would wait for rank 2."""
    x, many = torch.zeros(1), 2000

    def run(transport: SharedMemoryTransport) -> bool:
        def send(peer: int) -> None:
            transport.send_recv([Outgoing((peer,), (x,))], [], "here").wait()

        def receive(peer: int) -> None:
            transport.send_recv([], [Incoming(peer, (TensorSpec.of(x),))], "here").wait()

        if transport.rank == 0:
            receive(1)
        elif transport.rank == 1:
            receive(2)
            send(0)
        else:
            for _ in range(many):
                send(0)
            send(1)
        return True

    assert on_threads(3, run) == [True] * 3


def test_a_late_peer_is_named_after_the_deadline() -> None:
    def run(transport: SharedMemoryTransport) -> float:
        if transport.rank:
            return 0.0
        start = time.monotonic()
        with pytest.raises(
            ExchangeError, match=r"rank 0 at conv_in: rank 1 has not answered rank 0 for 0.3 s.*\(4, 3\)"
        ):
            send_recv(transport, 4, 4)
        return time.monotonic() - start

    waited, _ = on_threads(2, run, deadline=0.3)
    assert 0.3 <= waited < 3


def test_a_peer_that_never_reads_is_named_after_the_deadline() -> None:
    def run(transport: SharedMemoryTransport) -> str:
        message = Outgoing((1,), (torch.zeros(1),))
        try:
            while transport.rank == 0:
                transport.send_recv([message], [], "conv_in")
        except ExchangeError as error:
            return str(error)
        time.sleep(1)
        return ""

    message, _ = on_threads(2, run, deadline=0.3)
    assert "rank 0 at conv_in: rank 1 has not read from rank 0 for 0.3 s" in message


def test_a_killed_peer_is_named_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    transport = SharedMemoryTransport(0, {1: ours}, torch.device("cpu"), deadline=60.0)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as peer:
        theirs.close()
        pending = transport.send_recv([], [Incoming(1, (TensorSpec((4, 3), torch.float32),))], "conv_in")
        peer.kill()
        start = time.monotonic()
        with pytest.raises(ExchangeError, match=r"rank 0 at conv_in: rank 1 is gone.*\(4, 3\)"):
            pending.wait()
        with pytest.raises(ExchangeError, match="rank 1 is gone"):
            transport.send_recv([Outgoing((1,), (torch.zeros(1),))], [], "conv_out")
        assert time.monotonic() - start < 20
    transport.close()


def test_what_a_peer_sent_before_it_left_still_arrives() -> None:
    def run(transport: SharedMemoryTransport) -> Any:
        if transport.rank:
            transport.send_recv([Outgoing((0,), (torch.ones(4, 3),))], [], "conv_in")
            transport.close()
            return None
        time.sleep(0.2)
        return transport.send_recv([], [Incoming(1, (TensorSpec((4, 3), torch.float32),))], "conv_in").wait()

    ((received,),), _ = on_threads(2, run)
    assert torch.equal(received, torch.ones(4, 3))


def test_messages_of_one_peer_come_in_order_even_if_the_later_is_awaited_first() -> None:
    def run(transport: SharedMemoryTransport) -> Any:
        peer, spec = 1 - transport.rank, TensorSpec((1,), torch.float32)
        messages = [Outgoing((peer,), (torch.full((1,), float(i)),)) for i in range(3)]
        pending = transport.send_recv(messages, [Incoming(peer, (spec,))] * 3, "here")
        return [pending.wait_for(index)[0].item() for index in (2, 0, 1)]

    assert on_threads(2, run) == [[2.0, 0.0, 1.0]] * 2


def test_what_is_received_is_not_overwritten_by_what_comes_later() -> None:
    def run(transport: SharedMemoryTransport) -> Any:
        peer, spec = 1 - transport.rank, TensorSpec((1000,), torch.float32)
        kept = []
        for number in range(20):
            message = Outgoing((peer,), (torch.full((1000,), float(number)),))
            kept.append(transport.send_recv([message], [Incoming(peer, (spec,))], "here").wait()[0][0])
        return [x.unique().tolist() for x in kept]

    assert on_threads(2, run) == [[[float(number)] for number in range(20)]] * 2


def test_where_memfd_is_refused_a_file_without_a_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    (((first,),), ((second,),)) = on_threads(2, lambda transport: send_recv(transport, 4, 4))
    assert first.shape == second.shape == (4, 3)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_closing_lets_go_of_everything() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what earlier tests have left goes now, and not meanwhile
    before = descriptors()
    for _ in range(3):
        transports = connected(3)
        x = torch.zeros(8 << 20)
        transports[0].send_recv([Outgoing((1, 2), (x,))], [], "here")  # one of them reads it
        transports[1].send_recv([], [Incoming(0, (TensorSpec.of(x),))], "here").wait()
        for transport in transports:
            transport.close()
            transport.close()
    assert descriptors() == before


def test_one_column_of_a_map_is_packed_without_gaps() -> None:
    """Flattened, it is a view with gaps, which torch.distributed refuses to send."""
    packed = pack([torch.arange(8.0).view(1, 2, 2, 2)[..., 1:]])
    assert packed.is_contiguous()
    assert packed.tolist() == [1.0, 3.0, 5.0, 7.0]


def test_messages_that_nobody_waits_for_any_more_keep_no_memory() -> None:
    """Of a call that was cancelled: the space of each would be kept, and the segments after it, each twice as large."""

    both = threading.Barrier(2)

    def run(transport: SharedMemoryTransport) -> int:
        peer, x = 1 - transport.rank, torch.ones(1 << 18)  # four of them fill the first segment
        for number in range(24):
            incoming = [Incoming(peer, (TensorSpec.of(x),))]
            work = transport.send_recv([Outgoing((peer,), (x,))], incoming, "there")
            if number % 8:
                assert torch.equal(work.wait()[0][0], x)
            del work
            both.wait(20)
        return len(transport._arena.segments)

    assert on_threads(2, run) == [1, 1]


def test_a_message_that_comes_after_nobody_waits_for_it_keeps_no_memory() -> None:
    first, second = connected(2)
    x = torch.ones(1 << 18)  # four of them fill the first segment
    with contextlib.closing(first), contextlib.closing(second):
        for _ in range(12):
            second.send_recv([], [Incoming(0, (TensorSpec.of(x),))], "there")  # and dropped
            second.send_recv([Outgoing((0,), (torch.ones(1),))], [], "there")  # when it has not come yet
            first.send_recv([Outgoing((1,), (x,))], [Incoming(1, (TensorSpec((1,), x.dtype),))], "there").wait()
            second.send_recv([Outgoing((0,), (torch.ones(1),))], [], "there")
            first.send_recv([], [Incoming(1, (TensorSpec((1,), x.dtype),))], "there").wait()
        assert len(first._arena.segments) == 1


def test_a_connection_that_is_replaced_frees_what_its_peer_has_not_read_and_nothing_else() -> None:
    first, second, third = transports = connected(3)
    x, (line, _other) = torch.ones(3), socket.socketpair()

    def read(by: SharedMemoryTransport) -> None:
        by.send_recv([], [Incoming(0, (TensorSpec.of(x),))], "there").wait()
        assert first.state_of(by.rank) == "open"  # takes note of what has been read

    first.send_recv([Outgoing((1, 2), (x,))], [], "there")
    read(second)
    first.send_recv([Outgoing((1,), (x,))], [], "there")
    first.add({1: line})
    (segment,) = first._arena.segments.values()
    assert segment.unread == 1
    read(third)
    assert segment.unread == 0
    for transport in transports:
        transport.close()


def test_of_several_reasons_the_first_is_named() -> None:
    (transport,) = connected(1)
    transport.poison("rank 1 is gone")
    transport.poison("the call has failed")
    with pytest.raises(ExchangeError, match="rank 1 is gone"):
        transport.check("conv_in")
    transport.recover()
    transport.check("conv_in")
    assert not transport.is_poisoned


@pytest.mark.parametrize("name", ["map_segment", "receive_with_descriptors"])
def test_a_message_for_which_there_is_no_descriptor_left_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else the next one would be taken for it."""
    first, second = connected(2)

    def fail(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with contextlib.closing(first), contextlib.closing(second):
        for x in (torch.ones(3), torch.zeros(3)):
            first.send_recv([Outgoing((1,), (x,))], [], "there")
        works = [second.send_recv([], [Incoming(0, (TensorSpec.of(x),))], "there") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(peer_socket, name, fail)
            with pytest.raises(ExchangeError, match="Too many open files"):
                works[0].wait()
        assert second.state_of(0) == "ended"
        with pytest.raises(ExchangeError, match="rank 0 is gone"):
            works[1].wait()


def test_more_descriptors_than_the_kernel_lets_be_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    send, failures = socket.send_fds, [OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")] * 2

    def limited(*args: Any) -> int:
        if failures:
            raise failures.pop()
        return send(*args)

    def run(transport: SharedMemoryTransport) -> bool:
        peer, x = 1 - transport.rank, torch.arange(3.0)
        work = transport.send_recv([Outgoing((peer,), (x,))], [Incoming(peer, (TensorSpec.of(x),))], "there")
        return torch.equal(work.wait()[0][0], x)

    monkeypatch.setattr(socket, "send_fds", limited)
    assert on_threads(2, run) == [True, True]
    assert failures == []


def test_groups_are_aborted_though_another_is_formed_meanwhile() -> None:
    aborted: list[str] = []
    groups = ProcessGroups("gloo", torch.device("cpu"), 1.0)

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            aborted.append(self.name)
            groups._own[(0, 1, 2), False] = self  # type: ignore[assignment]

    groups._own.update({((0, 1), bulk): Group(str(bulk)) for bulk in (False, True)})  # type: ignore[misc]
    groups.abort()
    assert sorted(aborted) == ["False", "True"]


def test_a_group_that_ends_only_with_the_others_and_their_graphs_does_not_hold_them_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As NCCL frees memory, for which all kernels of the GPU have to end, and waits until no graph is left."""
    begun, released, ended = [threading.Event() for _ in range(2)], threading.Event(), list[int]()

    class Group:
        def __init__(self, number: int) -> None:
            self.number = number

        def abort(self) -> None:
            begun[self.number].set()
            if all(each.wait(60) for each in (*begun, released)):
                ended.append(self.number)

    groups = ProcessGroups("nccl", torch.device("cpu"), 1.0)
    groups._own.update({((0, 1), bulk): Group(int(bulk)) for bulk in (False, True)})  # type: ignore[misc]
    groups.abort(released.set)
    assert sorted(ended) == [0, 1]
    released.clear()
    monkeypatch.setattr(torch_groups, "ABORT_SECONDS", 0.05)
    groups.abort()
    assert "2 of 2 groups of nccl have not ended in 0.05 s" in caplog.text, "control: one that never ends"
    released.set()


@pytest.mark.parametrize("deadline", [60.0, 1000.0])
def test_torch_ends_no_process_before_the_deadline_has_passed_many_times(deadline: float) -> None:
    """Its own limit of a group of NCCL, after which it ends the process, is never below that of a rank's own wait."""
    groups = ProcessGroups("nccl", torch.device("cpu"), deadline)
    assert groups._timeout.total_seconds() >= longest_wait(deadline) == 300 * deadline


@pytest.mark.parametrize("name", ["nccl", "nccl-legacy"])
def test_groups_are_of_the_implementation_of_nccl_that_has_been_tried(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also in a default group of a script, which may be of the other one."""
    made = list[str]()
    monkeypatch.setattr(dist, "is_backend_available", {"nccl", name}.__contains__)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, backend, options: made.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    ProcessGroups("nccl", torch.device("cpu"), 1.0)._new((0, 1), bulk=True)
    assert made == [name]


@pytest.mark.parametrize("name", ["os.ftruncate", "mmap.mmap"])
def test_memory_that_there_is_not_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    made: list[int] = []

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def new_file(_: str) -> int:
        made.append(os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT))
        return made[0]

    monkeypatch.setattr(arena, "anonymous_file", new_file)
    with monkeypatch.context() as patch:
        patch.setattr(f"patchpar.comm.transport.arena.{name}", fail)
        with pytest.raises(OSError, match="allocate"):
            arena.Arena().take(100)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(made[0])


def test_a_group_that_gloo_cannot_make_is_an_error_of_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise dist.DistStoreError("wait timeout after 1000ms")

    monkeypatch.setattr(dist, "new_group", refused)
    groups = ProcessGroups("gloo", torch.device("cpu"), 1.0)
    with pytest.raises(ExchangeError, match=r"the group of ranks \[0, 1\] of gloo .* wait timeout after 1000ms"):
        groups.form([(0, 1)], with_bulk=False)
