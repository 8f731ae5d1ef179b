"""How NCCL is waited for, on works and events that only pretend: the stream waits, the process does not."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import (
    Incoming,
    LinkTransport,
    Outgoing,
    TensorSpec,
    connect_group,
    form_groups,
    link_groups,
    stream_waits,
)
from patchpar.comm.transport.link_groups import LinkGroups
from patchpar.comm.transport.stream_waits import ENQUEUED, GLANCE, StreamWaits
from patchpar.comm.transport.torch_collectives import LARGE
from patchpar.comm.transport.torch_groups import NCCL_SECONDS
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import ExchangeError
from patchpar.launch.hang_detection import WORK_TIMES
from patchpar.launch.nccl_failures import FAILURES_ARE_RAISED


class Gpu:
    """A GPU and what is enqueued on it. `seconds`: what its stream has done, which a work that never ends holds up.

    `reached`: how far it has come then.
    """

    def __init__(self) -> None:
        self.enqueued: list[str] = []
        self.groups: list[Group] = []
        self.works: list[weakref.ref[Work]] = []
        self.stuck = False
        self.seconds, self.reached = 0.0, -1.0

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at, self.recorded = gpu, 0.0, False

    def record(self) -> None:
        self.at, self.recorded = self.gpu.seconds, True

    def query(self) -> bool:
        return self.recorded and (not self.gpu.stuck or self.at <= self.gpu.reached)

    def synchronize(self) -> None:
        assert not self.gpu.stuck, "this would wait for ever"

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Group:
    """A process group. Aborting it lets the stream go on."""

    def __init__(self, gpu: Gpu, ranks: Sequence[int], options: Any) -> None:
        self.gpu, self.ranks = gpu, list(ranks)
        self.is_urgent = options is not None and options.is_high_priority_stream
        gpu.groups.append(self)

    def all_gather_single(self, rows: Any, own: Any, options: Any) -> Work:
        self.gpu.enqueued.append(f"gather {own.numel()}{' urgent' * self.is_urgent}")
        return Work(self.gpu, ())

    def all_to_all_single(self, into: Any, own: Any, *rest: Any) -> Work:
        self.gpu.enqueued.append(f"all to all{' urgent' * self.is_urgent}")
        return Work(self.gpu, ())

    def abort(self) -> None:
        self.gpu.enqueued.append("abort")
        self.gpu.stuck = False


class Work:
    """Takes a quarter of a second of the stream. `broken`: what torch says of it."""

    def __init__(self, gpu: Gpu, operations: Sequence[Any], broken: str = "") -> None:
        self.gpu, self.operations, self.broken = gpu, operations, broken

    def wait(self, timeout: Any = None) -> None:
        assert timeout is None, "with a timeout it is the process that waits"
        if self.broken:
            raise RuntimeError(self.broken)
        self.gpu.enqueued.append("wait")
        self.gpu.seconds += 0.25
        for operation in self.operations:
            if operation.what == "receive":
                operation.x.fill_(7)

    def is_completed(self) -> bool:
        return not self.gpu.stuck


@pytest.fixture(params=["nccl", "undefined"], ids=["a group of NCCL", "init_process_group() without a backend"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """In the place of NCCL, and of an accelerator's events."""
    gpu = Gpu()

    def batch(operations: Sequence[Any]) -> list[Work]:
        gpu.enqueued.append("batch")
        works = [Work(gpu, operations, gpu.__dict__.get("broken", ""))]
        gpu.works += map(weakref.ref, works)
        return works

    def barrier(group: Group, *, async_op: bool, device_ids: Sequence[int]) -> Any:
        assert async_op, "else the process waits for as long as torch does"
        gpu.enqueued.append(f"barrier {group.ranks} {device_ids}")
        if "no_barrier" in gpu.__dict__:
            raise RuntimeError(gpu.__dict__["no_barrier"])
        return SimpleNamespace(is_completed=lambda: not gpu.stuck, wait=lambda: None)

    distributed = {
        "get_backend": lambda: request.param,
        "get_backend_config": lambda: "cpu:nccl",
        "get_rank": lambda: 2,
        "get_world_size": lambda: 3,
        "new_group": lambda ranks, timeout, backend, options: Group(gpu, ranks, options),
        "ProcessGroupNCCL": SimpleNamespace(Options=SimpleNamespace),
        "destroy_process_group": lambda group: None,
        "barrier": barrier,
        "isend": "send",
        "irecv": "receive",
        "P2POp": lambda what, x, peer, group: SimpleNamespace(what=what, x=x, peer=peer),
        "batch_isend_irecv": batch,
    }
    for name, fake in distributed.items():
        monkeypatch.setattr(torch.distributed, name, fake, raising=False)
    monkeypatch.setattr(torch.cpu, "Event", gpu.event)
    monkeypatch.setattr(torch.cpu, "current_device", lambda: 3)
    return gpu


def transport(deadline: float = 60.0) -> TorchTransport:
    return TorchTransport(torch.device("cpu"), deadline)


SPEC = TensorSpec((2,), torch.float32)


def test_all_ranks_meet_before_the_first_exchange(gpu: Gpu) -> None:
    transport()
    assert gpu.enqueued == ["barrier [0, 1, 2] [3]"]


def test_ranks_that_do_not_meet_fail_within_the_deadline(gpu: Gpu) -> None:
    """As GPUs without access to each other's memory, of which NCCL does not know: torch would wait for a day."""
    gpu.stuck = True
    with pytest.raises(ExchangeError, match=r"rank 2 at the first operation.* 0\.05 s.*--ipc=host.*NCCL_P2P_DISABLE=1"):
        transport(deadline=0.05)
    assert gpu.enqueued[1:] == ["abort", "abort"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("new_group", r"the group of ranks \[0, 1, 2\] of nccl is not there within 0\.05 s: another rank has not come"),
        ("barrier", r"rank 2 at the first operation.* 0\.05 s.*--ipc=host"),
    ],
)
def test_ranks_that_nccl_waits_for_in_a_call_fail_within_the_deadline(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    """It connects ranks in calls that return when all are there: a rank may have failed before it came to that."""
    blocked, call = threading.Event(), getattr(torch.distributed, name)

    def blocking(*args: Any, **kwargs: Any) -> Any:
        blocked.wait(60)
        return call(*args, **kwargs)

    monkeypatch.setattr(torch.distributed, name, blocking)
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(transport, deadline=0.05)
        try:
            with pytest.raises(ExchangeError, match=message):
                made.result(timeout=30)
        finally:
            blocked.set()


def test_a_group_that_another_rank_does_not_come_to_ends_the_transport(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of groups are counted on each rank, so that later ones would be others."""
    line, blocked = transport(deadline=0.05), threading.Event()
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_: blocked.wait(60))
    with pytest.raises(ExchangeError, match=r"the group of ranks \[0, 2\]"):
        form_groups(line, [(0, 2)], symmetric_memory=False)
    blocked.set()
    with pytest.raises(ExchangeError, match=r"not used again.*the group of ranks \[0, 2\]"):
        line.send_recv([], [], "norm1")


@pytest.mark.parametrize("backend", ["xccl", "hccl"])
def test_other_backends_of_streams_have_the_deadline_too(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Those of Intel's and Ascend's accelerators: neither torch's own limit nor a call without an end is waited for."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: f"cpu:{backend}")
    made, make, blocked = [], torch.distributed.new_group, threading.Event()

    def noted(ranks: Any, timeout: Any, *rest: Any) -> Any:
        made.append((timeout.total_seconds(), *rest))
        return make(ranks, timeout, *rest)

    monkeypatch.setattr(torch.distributed, "new_group", noted)
    line = transport(deadline=0.5)
    assert made == [(NCCL_SECONDS, backend, None)] * 2, "torch would end the process at the group's own limit"
    assert line.waits is not None
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_: blocked.wait(60))
    try:
        with pytest.raises(
            ExchangeError, match=rf"the group of ranks \[0, 2\] of {backend} is not there within 0\.5 s"
        ):
            form_groups(line, [(0, 2)], symmetric_memory=False)
    finally:
        blocked.set()


def test_what_nccl_says_of_the_first_operation_is_passed_on(gpu: Gpu) -> None:
    gpu.__dict__["no_barrier"] = "unhandled system error"
    with pytest.raises(ExchangeError, match=r"first operation of all ranks: unhandled system error\. With NCCL_DEBUG"):
        transport()


def test_what_this_step_needs_has_a_stream_of_its_own_and_priority(gpu: Gpu) -> None:
    """Two groups of the same ranks are two communicators with a stream each."""
    line = transport()
    assert [(group.ranks, group.is_urgent) for group in gpu.groups] == [([0, 1, 2], True), ([0, 1, 2], False)]
    assert line.collectives is not None
    line.collectives.form([(0, 1, 2), (0, 2)])
    assert [(group.ranks, group.is_urgent) for group in gpu.groups[2:]] == [([0, 2], True), ([0, 2], False)]


@pytest.mark.parametrize("standalone", [False, True])
def test_torch_does_not_end_the_process_where_nccl_fails(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, standalone: bool
) -> None:
    """Its thread would: it sees within 0.1 s that a rank is gone, or has ended its groups at its own deadline."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # torchrun's
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    before, found = dict(os.environ), []

    def made(*_: Any) -> Group:
        found.append({name: os.environ.get(name) for name in FAILURES_ARE_RAISED})
        return Group(gpu, (), None)

    monkeypatch.setattr(torch.distributed, "new_group", made)
    made.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", made)
    if standalone:
        groups = LinkGroups("nccl", torch.device("cpu"), 0, 30.0)
        groups.renew(torch.distributed.HashStore(), [(0, 1)], [(0, 1)])
    else:
        transport()
    assert found == [FAILURES_ARE_RAISED] * (3 if standalone else 2)
    assert dict(os.environ) == before, "groups of the script keep its settings"


@pytest.mark.parametrize("comes", [True, False])
def test_ranks_tell_each_other_their_groups_within_the_deadline(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Not through the default group of the script, which has torch's limit."""

    def gather(group: Group, rows: Any, own: Any, options: Any) -> Work:
        rows.view(-1, *own.shape).copy_(own)
        gpu.stuck = not comes
        return Work(gpu, ())

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group)
    monkeypatch.setattr(Group, "all_gather_single", gather)
    if comes:
        line, ranks = connect_group(torch.device("cpu"), 30.0, [2, 0])
        assert ranks == (0, 2)
        assert line.collectives is not None
        assert line.collectives.covers((0, 2))
        return
    gpu.reached = 0.0
    with pytest.raises(ExchangeError, match=r"rank 2 at the groups of all ranks: the other ranks have not taken part"):
        connect_group(torch.device("cpu"), 0.2, [2, 0])


def test_ranks_connect_when_their_groups_are_made(gpu: Gpu) -> None:
    """By one operation of each kind and size: the first waits for the others in a call, and so would a step."""
    collectives: Any = transport().collectives
    gpu.enqueued.clear()
    for _ in range(2):
        collectives.form([(0, 1, 2)])
    begun = [each for each in gpu.enqueued if each != "wait"]
    bulk = ["gather 1", f"gather {LARGE}", "all to all"]
    assert begun == [*(f"{each} urgent" for each in bulk), *bulk]


def test_the_process_goes_on_while_the_stream_waits(gpu: Gpu) -> None:
    line = transport()
    into = torch.zeros(2)
    pending = line.send_recv([Outgoing((0,), (torch.ones(2),))], [Incoming(0, (SPEC,), (into,))], "conv_in")
    gpu.stuck = True
    (received,) = pending.wait()
    assert received[0] is into
    assert into.tolist() == [7, 7]
    assert pending.wait() == [received]
    assert gpu.enqueued[1:] == ["batch", "wait"]


def test_what_the_stream_waits_for_is_booked_once_it_is_known(gpu: Gpu) -> None:
    comm = Communicator(transport())
    arriving = comm.receive("halo", "conv_in", 0, [SPEC])
    gpu.stuck = True
    arriving.wait()
    arriving.wait()
    of_process = comm.traffic.seconds_waited["halo"]
    comm.traffic.book_stalls(block=False)
    assert comm.traffic.seconds_waited["halo"] == of_process
    gpu.stuck = False
    for block in (False, True):
        comm.traffic.book_stalls(block=block)
        assert comm.traffic.seconds_waited["halo"] == pytest.approx(of_process + 0.25)
    comm.receive("halo", "conv_in", 0, [SPEC]).wait()
    comm.traffic.clear()
    comm.traffic.book_stalls(block=True)
    assert comm.traffic.seconds_waited == {}


def test_a_message_that_never_comes_is_named_by_a_later_exchange(gpu: Gpu) -> None:
    line = transport()
    line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    gpu.stuck = True
    line.send_recv([], [Incoming(1, (SPEC,))], "norm2").wait()
    line.deadline = 0.0
    assert line.waits is not None
    line.waits.look()  # as the thread does
    with pytest.raises(ExchangeError, match=r"rank 2 at norm1: no message from ranks \[1\] of shapes \[\(2,\)\]"):
        line.send_recv([], [], "norm3")
    with pytest.raises(ExchangeError, match=r"rank 2 at norm4: .* not used again.*: rank 2 at norm1: no message"):
        line.send_recv([], [], "norm4")


def test_a_late_message_frees_the_stream_though_the_process_is_blocked(gpu: Gpu) -> None:
    """As in a synchronisation with the GPU: nobody starts another exchange, which would look back."""
    line = transport(deadline=0.05)
    gpu.stuck, gpu.reached = True, 0.0
    line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    give_up = time.monotonic() + 60
    while gpu.stuck and time.monotonic() < give_up:
        time.sleep(0.01)
    assert gpu.enqueued[-1] == "abort"
    with pytest.raises(ExchangeError, match=r"rank 2 at norm1: no message from ranks \[1\] .* within 0.05 s"):
        line.settle("end of the call")
    line.close()


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_exchange_whose_begin_waits_for_the_others_ends(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """NCCL connects in the first call of a kind, which returns when the other rank has made it, or has been aborted."""
    line, flag = transport(deadline=60.0 if is_cut else 0.6), RecordedFlag()
    line.waiting = flag
    assert line.waits is not None
    line.waits._is_cut = lambda: is_cut

    def connecting(operations: Sequence[Any]) -> Any:
        give_up = time.monotonic() + 30
        while "abort" not in gpu.enqueued and time.monotonic() < give_up:
            time.sleep(0.01)
        raise RuntimeError("aborted by another thread")

    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", connecting)
    reason = "as a rank is gone" if is_cut else "within 0.6 s"
    with pytest.raises(
        ExchangeError, match=rf"rank 2 at norm1: the other ranks have not come to the exchange.* {reason}"
    ):
        line.send_recv([], [Incoming(1, (SPEC,))], "norm1")
    assert is_cut or True in flag.values, "the caller is told that this rank only waits"
    line.close()


@pytest.mark.parametrize("through_links", [False, True])
def test_ranks_that_do_not_connect_fail_within_the_deadline(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, through_links: bool
) -> None:
    """torch knows a communicator once NCCL has made it: an abort does not end the call that waits for the others."""
    blocked = threading.Event()

    def connecting(*_: Any) -> Any:
        blocked.wait(60)
        raise RuntimeError("the test is over")

    def form() -> None:
        if through_links:
            monkeypatch.setattr(link_groups, "standalone_group", lambda store, own: Group(gpu, own.ranks, None))
            host: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), deadline=0.6, waiting=nullcontext())
            host.is_cut = False
            LinkTransport(host, "nccl", "a").renew(torch.distributed.HashStore(), [(0, 1)], [])
        else:
            form_groups(transport(deadline=0.6), [(0, 2)], symmetric_memory=False)

    for name in ("send", "all_gather_single"):
        monkeypatch.setattr(Group, name, connecting, raising=False)
    with ThreadPoolExecutor(1) as thread:
        formed = thread.submit(form)
        try:
            with pytest.raises(ExchangeError, match=r"of nccl is not there within 0\.6 s: another rank has not come"):
                formed.result(timeout=30)
        finally:
            blocked.set()
    assert gpu.enqueued.count("abort") >= 1


def test_no_group_is_released_while_it_is_aborted(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of deadlines aborts what is late, and the call that fails by it closes its transport."""
    line, aborts, goes_on = transport(), threading.Event(), threading.Event()

    def abort(group: Group) -> None:
        aborts.set()
        goes_on.wait(30)
        gpu.enqueued.append("aborted")

    monkeypatch.setattr(Group, "abort", abort)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: gpu.enqueued.append("released"))
    threads = [threading.Thread(target=line.poison, args=("late",)), threading.Thread(target=line.close)]
    threads[0].start()
    assert aborts.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    goes_on.set()
    for thread in threads:
        thread.join(30)
    assert gpu.enqueued[-4:] == ["aborted"] * 2 + ["released"] * 2


def test_groups_with_a_late_exchange_are_aborted_before_they_are_released(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits sees that an exchange is late before the thread that says so aborts: to release waits for its end."""
    line = transport(deadline=0.05)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: gpu.enqueued.append("released"))
    assert line.waits is not None
    monkeypatch.setattr(line.waits, "_on_late", lambda reason: None)  # the thread has not come to it
    gpu.stuck, gpu.reached = True, 0.0
    line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    with pytest.raises(ExchangeError, match=r"rank 2 at norm1: no message from ranks \[1\]"):
        line.settle("end of the call")
    line.close()
    assert gpu.enqueued[-4:] == ["abort"] * 2 + ["released"] * 2


def test_groups_that_torch_cannot_release_are_left(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for operations in flight, and for an abort that hangs, which has the lock of the communicator."""
    line, blocked = transport(deadline=0.5), threading.Event()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: blocked.wait(60))
    with ThreadPoolExecutor(1) as thread:
        closed = thread.submit(line.close)
        try:
            closed.result(timeout=20)
        finally:
            blocked.set()


class Clock:
    """In the place of `time`. `now`: seconds."""

    def __init__(self) -> None:
        self.now, self.sleep = 100.0, time.sleep

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(stream_waits, "time", found)
    return found


def test_a_gpu_that_computes_before_a_wait_is_not_late(gpu: Gpu, clock: Clock) -> None:
    """The process enqueues the wait at once, and a call of the network takes longer than the deadline."""
    late: list[str] = []
    waits = StreamWaits("cpu", lambda: 60.0, late.append, lambda waits: None)
    gpu.stuck = True
    waits.wait_for([Work(gpu, ())], lambda: "rank 2 at guidance: no message from ranks [1]")
    for _ in range(10):
        clock.now += 10
        waits.look()
    assert late == [], "it has computed for 100 s"
    gpu.reached = 0.0
    for _ in range(25):
        waits.look()
        clock.now += 10
    assert late == [], "another rank may compute as long as this one"
    clock.now += 20
    waits.look()
    assert late == ["rank 2 at guidance: no message from ranks [1] within 260 s"], "control: it waits for too long"


def test_a_graph_has_the_time_that_the_gpu_computed_before(gpu: Gpu, clock: Clock) -> None:
    """It computes and waits in one. Its steps have run before it was captured."""
    late: list[str] = []
    waits = StreamWaits("cpu", lambda: 60.0, late.append, lambda waits: None)
    gpu.stuck = True
    waits.wait_for([Work(gpu, ())], lambda: "rank 2 at guidance: no message from ranks [1]")
    clock.now += 100
    waits.look()
    gpu.stuck = False
    waits.look()
    waits.watch(lambda: False, lambda: "rank 2: the replay of its graph has not ended")
    clock.now += 250
    waits.look()
    assert late == []
    clock.now += 20
    waits.look()
    assert late == ["rank 2: the replay of its graph has not ended within 260 s"]


def test_a_gpu_that_never_ends_what_it_computes_is_said(gpu: Gpu, clock: Clock) -> None:
    late: list[str] = []
    waits = StreamWaits("cpu", lambda: 60.0, late.append, lambda waits: None)
    gpu.stuck = True
    waits.wait_for([Work(gpu, ())], lambda: "rank 2 at norm1: no message")
    clock.now += WORK_TIMES * 60.0 + 1
    waits.look()
    assert late == ["rank 2 at norm1: no message: the GPU of this rank has not come to that wait within 1800 s"]


def test_kernels_that_wait_for_other_ranks_have_the_deadline_from_their_start(gpu: Gpu, clock: Clock) -> None:
    """They stand before the events of a wait, so that nobody knows whether the GPU computes."""
    late: list[str] = []
    waits = StreamWaits("cpu", lambda: 60.0, late.append, lambda waits: None)
    gpu.stuck = True
    waits.wait_for([ENQUEUED], lambda: "rank 2 at norm1: no message")
    clock.now += 61
    waits.look()
    assert late == ["rank 2 at norm1: no message within 60 s"]


def test_a_rank_that_is_gone_frees_the_stream_before_the_deadline(gpu: Gpu) -> None:
    late: list[str] = []
    gone: list[bool] = []
    waits = StreamWaits("cpu", lambda: 1e6, late.append, lambda waits: None, lambda: bool(gone))
    gpu.stuck = True
    waits.wait_for([Work(gpu, ())], lambda: "rank 2 at stream: no message from ranks [1]")
    waits.look()
    assert late == []
    gone.append(True)
    with pytest.raises(ExchangeError, match=r"no message from ranks \[1\], as a rank is gone"):
        waits.settle()
    assert len(late) == 1
    waits.close()


def test_a_wait_long_after_the_exchange_was_begun_is_watched(gpu: Gpu) -> None:
    """By then the thread that was woken for the exchange has found nothing to watch, and sleeps."""
    late = threading.Event()
    waits = StreamWaits("cpu", lambda: 0.05, lambda text: late.set(), lambda waits: None)
    waits.wake_watch()
    while waits.has_news:
        time.sleep(GLANCE / 10)
    gpu.stuck, gpu.reached = True, 0.0
    waits.wait_for([Work(gpu, ())], lambda: "rank 2 at norm1: no message")
    assert late.wait(60)
    waits.close()


@pytest.mark.parametrize("ended", [False, True])
def test_what_was_awaited_before_the_end_poisons_nothing_after_it(gpu: Gpu, ended: bool) -> None:
    """The thread of deadlines looks once more; a transport may have made its groups anew by then."""
    late: list[str] = []
    waits = StreamWaits("cpu", lambda: 1e6, late.append, lambda waits: None, lambda: bool(gone))
    gone: list[bool] = []
    gpu.stuck = True
    waits.wait_for([Work(gpu, ())], lambda: "rank 2 at stream: no message from ranks [1]")
    if ended:
        waits.close()
    gone.append(True)
    waits.look()
    assert bool(late) != ended
    waits.close()
    if ended:
        waits.settle()  # returns


def test_no_thread_asks_the_gpu_while_a_graph_is_captured(gpu: Gpu) -> None:
    line = transport()
    line.deadline = 0.0  # its groups have been formed
    assert line.waits is not None
    gpu.stuck = True
    with line.waits.paused():
        line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
        line.send_recv([], [], "norm2")
        time.sleep(2 * GLANCE)
        assert "abort" not in gpu.enqueued
    with pytest.raises(ExchangeError, match="norm1"):
        line.settle("end of the call")


def test_what_is_awaited_keeps_nothing_that_has_been_received(gpu: Gpu) -> None:
    """The process is a step ahead of the GPU, and a work of NCCL keeps its buffers: those of a step would be held."""
    line, into = transport(), torch.zeros(2)
    kept = weakref.ref(into)
    gpu.stuck = True
    line.send_recv([], [Incoming(1, (SPEC,), (into,))], "norm1").wait()
    del into
    assert line.waits is not None
    assert len(line.waits._awaited) == 1
    assert [kept(), *(work() for work in gpu.works)] == [None, None]
    gpu.stuck = False
    line.settle("end of the call")
    line.close()


def test_a_call_ends_when_the_last_message_has_come(gpu: Gpu) -> None:
    line = transport()
    gpu.stuck = True
    line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    with ThreadPoolExecutor(1) as thread:
        end = thread.submit(line.settle, "end of the call")
        time.sleep(0.05)
        assert not end.done()
        gpu.stuck = False
        end.result(timeout=60)


def test_a_message_may_take_its_time(gpu: Gpu) -> None:
    line = transport()
    line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    gpu.stuck = True
    assert line.waits is not None
    line.waits.look()  # as the thread does
    line.send_recv([], [], "norm2")
    assert "abort" not in gpu.enqueued


def test_what_torch_says_of_a_broken_work(gpu: Gpu) -> None:
    line = transport()
    gpu.__dict__["broken"] = "NCCL communicator was aborted"
    with pytest.raises(ExchangeError, match=r"rank 2 at norm1: no message .* communicator was aborted"):
        line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    with pytest.raises(ExchangeError, match="not used again"):
        line.send_recv([], [], "norm2")


class RecordedFlag(AbstractContextManager[None]):
    """Stands for a rank's WaitingFlag."""

    def __init__(self) -> None:
        self.values: list[bool] = []

    def __exit__(self, *_: object) -> None: ...

    def set_stream_waiting(self, waits: bool) -> None:
        self.values.append(waits)


def test_a_stream_that_waits_is_told_from_one_that_works(gpu: Gpu) -> None:
    """NCCL's kernel uses the GPU while it waits for another rank: the events around the wait tell which it is."""
    line, flag = transport(), RecordedFlag()
    line.waiting = flag
    assert line.waits is not None
    gpu.stuck = True
    line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    line.waits.look()
    assert flag.values[-1] is False, "it has kernels of its own before the wait"
    gpu.reached = 0.0  # which are done
    line.waits.look()
    assert flag.values[-1] is True
    with line.waits.paused():
        assert flag.values[-1] is False
    line.waits.look()
    assert flag.values[-1] is True
    gpu.stuck = False
    line.settle("end of the call")
    assert flag.values[-1] is False
    line.close()


@pytest.mark.parametrize("end", ["late", "close"])
def test_nothing_waits_any_more_at_the_end(gpu: Gpu, end: str) -> None:
    line, flag = transport(), RecordedFlag()
    line.waiting = flag
    assert line.waits is not None
    gpu.stuck, gpu.reached = True, 0.0
    line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()
    line.waits.look()
    assert flag.values[-1] is True
    if end == "late":
        line.deadline = 0.0
    else:
        line.waits.close()
    line.waits.look()
    assert flag.values[-1] is False


def test_what_computes_and_exchanges_in_one_does_not_count_as_a_wait(gpu: Gpu) -> None:
    """As the replay of a graph: nobody knows which of both it does."""
    line, flag = transport(), RecordedFlag()
    line.waiting = flag
    assert line.waits is not None
    gpu.stuck, gpu.reached = True, 10.0
    line.waits.watch(lambda: False, lambda: "a graph")
    line.waits.look()
    assert flag.values[-1] is False
    line.close()
