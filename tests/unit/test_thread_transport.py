"""Messages between threads: in order, copied, with a deadline, and ended by the failure of any rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from patchpar.comm.transport import Incoming, Mailboxes, Outgoing, TensorSpec, ThreadTransport
from patchpar.errors import ExchangeError

SPEC = TensorSpec((2,), torch.float32)


def transports(count: int = 2, deadline: float = 10.0) -> list[ThreadTransport]:
    mailboxes = Mailboxes([torch.device("cpu")] * count)
    return [ThreadTransport(rank, mailboxes, deadline) for rank in range(count)]


def test_messages_arrive_in_order_and_are_copies() -> None:
    one, other = transports()
    sent = torch.ones(2)
    for value in (1.0, 2.0):
        sent.fill_(value)
        one.send_recv([Outgoing((1,), (sent,))], [], "here")
    first, second = (other.send_recv([], [Incoming(0, (SPEC,))], "here") for _ in range(2))
    assert second.wait()[0][0].tolist() == [2.0, 2.0]  # in any order of waits
    assert first.wait()[0][0].tolist() == [1.0, 1.0]


def test_into_a_buffer_and_as_other_numbers() -> None:
    one, other = transports()
    into = torch.zeros(2)
    one.send_recv([Outgoing((1,), (torch.tensor([1.0, 3.0]), torch.arange(2)))], [], "here")
    specs = (SPEC, TensorSpec((4,), torch.int32))
    found = other.send_recv([], [Incoming(0, specs, (into, None))], "here").wait()[0]
    assert found[0] is into
    assert into.tolist() == [1.0, 3.0]
    assert found[1].tolist() == [0, 0, 1, 0]


def test_a_receiver_that_waits_is_woken() -> None:
    one, other = transports()
    work = other.send_recv([], [Incoming(0, (SPEC,))], "here")
    thread = threading.Thread(target=lambda: one.send_recv([Outgoing((1,), (torch.ones(2),))], [], "here"))
    thread.start()
    assert work.wait()[0][0].tolist() == [1.0, 1.0]
    thread.join()


def test_a_late_rank_and_another_size_are_errors() -> None:
    one, other = transports(deadline=0.05)
    with pytest.raises(ExchangeError, match=r"rank 1 at here: rank 0 has not answered rank 1 for .*\(2,\)"):
        other.send_recv([], [Incoming(0, (SPEC,))], "here").wait()
    one.send_recv([Outgoing((1,), (torch.ones(3),))], [], "here")  # the message that was waited for
    one.send_recv([Outgoing((1,), (torch.ones(3),))], [], "here")
    wrong = r"rank 0 sent \(3,\) torch.float32, but \(2,\) torch.float32"
    with pytest.raises(ExchangeError, match=wrong):
        other.send_recv([], [Incoming(0, (SPEC,))], "here").wait()


def test_ranks_that_wait_for_one_with_a_message_of_another_size_end_with_it() -> None:
    one, other, third = transports(3, deadline=600)
    one.send_recv([Outgoing((1,), (torch.ones(3),))], [], "here")
    with pytest.raises(ExchangeError, match="rank 0 sent"):
        other.send_recv([], [Incoming(0, (SPEC,))], "here").wait()
    work = third.send_recv([], [Incoming(1, (SPEC,))], "there")
    with pytest.raises(ExchangeError, match="rank 0 sent"):
        work.wait()


def test_a_message_that_is_there_is_read_though_a_rank_has_failed() -> None:
    one, other = transports()
    one.send_recv([Outgoing((1,), (torch.ones(2),))], [], "here")
    one.poison("it has lost its device")
    assert other.send_recv([], [Incoming(0, (SPEC,))], "here").wait()[0][0].tolist() == [1.0, 1.0]


def test_a_rank_that_has_waited_too_long_is_not_waited_for() -> None:
    one, other = transports(deadline=600)
    one.deadline = 0.05
    with pytest.raises(ExchangeError, match="rank 1 has not answered rank 0"):
        one.send_recv([], [Incoming(1, (SPEC,))], "here").wait()
    work = other.send_recv([], [Incoming(0, (SPEC,))], "there")
    with pytest.raises(ExchangeError, match="rank 1 has not answered rank 0"):
        work.wait()


def test_a_rank_that_fails_ends_the_waits_of_others() -> None:
    one, two, three = transports(3, deadline=600)
    one.send_recv([Outgoing((2,), (torch.zeros(2),))], [], "never read")
    work = two.send_recv([], [Incoming(0, (SPEC,))], "here")
    start = time.monotonic()
    threading.Timer(0.05, lambda: one.poison("it has lost its device")).start()
    with pytest.raises(ExchangeError, match="it has lost its device"):
        work.wait()
    assert time.monotonic() - start < 60
    two.poison("it has ended after the other")
    with pytest.raises(ExchangeError, match="it has lost its device"):
        three.send_recv([], [Incoming(1, (SPEC,))], "here").wait()
    with pytest.raises(ExchangeError, match="it has lost its device"):
        one.send_recv([], [], "here")
    for each in (one, two, three):
        each.recover()
        each.deadline = 10.0
    one.mailboxes.clear()
    one.send_recv([Outgoing((1, 2), (torch.ones(2),))], [], "here")
    for each in (two, three):
        assert each.send_recv([], [Incoming(0, (SPEC,))], "here").wait()[0][0].tolist() == [1.0, 1.0]
