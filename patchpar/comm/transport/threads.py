"""Messages between ranks that are threads of one process: each tensor is copied once, to the receiver's device.

    sender                                       receiver
    copy to the receiver's device, in a mailbox
                                          --->   takes it out in the order of its exchanges

There is no process group and no NCCL. On GPUs the receiver's stream waits for the copy by an event. Ours.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchpar.comm.transport.message import Incoming, Messages, Outgoing, TensorSpec, Work
from patchpar.comm.transport.poison import Poisonable
from patchpar.errors import ExchangeError
from patchpar.launch.accelerators import device_module, is_accelerator


class MailboxKey(NamedTuple):
    """A message: the `number`-th from one rank to another."""

    sender: int
    receiver: int
    number: int


class HandedOver(NamedTuple):
    """Tensors on the receiver's device. `copied`: the event on the sender's stream after the copy; None on CPUs."""

    tensors: tuple[Tensor, ...]
    copied: Any


class Mailboxes:
    """What ranks of one process have sent each other; `devices` are theirs. Shared by all of their threads."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._changed = threading.Condition()
        self._held: dict[MailboxKey, HandedOver] = {}
        self._sent: Counter[tuple[int, int]] = Counter()
        self._failure = ""

    def put(self, sender: int, receiver: int, message: HandedOver) -> None:
        """Hand over the next message of a rank to another."""
        with self._changed:
            number = self._sent[sender, receiver]
            self._sent[sender, receiver] += 1
            self._held[MailboxKey(sender, receiver, number)] = message
            self._changed.notify_all()

    def take(self, key: MailboxKey, seconds: float) -> HandedOver | None:
        """Return a message; None after `seconds` without it. Raises ExchangeError once a rank has failed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._held or self._failure, timeout=max(seconds, 0.0))
            found = self._held.pop(key, None)
            if found is None and self._failure:
                raise ExchangeError(self._failure)
            return found

    def fail(self, reason: str) -> None:
        """Let all ranks that wait for a message that is not there raise ExchangeError with `reason`, the first one."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all messages and failures: no thread uses the mailboxes now."""
        with self._changed:
            self._held.clear()
            self._sent.clear()
            self._failure = ""


class ThreadTransport(Poisonable):
    """Messages from one thread's rank to those of other threads. `deadline`: seconds of one wait."""

    collectives = None

    def __init__(self, rank: int, mailboxes: Mailboxes, deadline: float) -> None:
        self.rank, self.deadline = rank, deadline
        self.device = mailboxes.devices[rank]
        self.waiting: AbstractContextManager[None] = contextlib.nullcontext()
        self.mailboxes = mailboxes
        self._expected: Counter[int] = Counter()  # messages by sender that have a number

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> "ThreadWork":
        """Copy outgoing tensors to the devices of their receivers; `Work.wait` takes the incoming ones.

        Raises ExchangeError.
        """
        self.check(where)
        for message in outgoing:
            for peer in message.peers:
                device = self.mailboxes.devices[peer]
                copies = tuple(
                    torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x.detach(), non_blocking=True)
                    for x in message.tensors
                )
                self.mailboxes.put(self.rank, peer, HandedOver(copies, self._recorded()))
        return ThreadWork(self, incoming, where)

    def number(self, message: Incoming) -> MailboxKey:
        """Return the key of the sender's next message: both sides count in the order of their exchanges."""
        number = self._expected[message.peer]
        self._expected[message.peer] += 1
        return MailboxKey(message.peer, self.rank, number)

    def fetch(self, message: Incoming, key: MailboxKey, where: str) -> list[Tensor]:
        """Wait for a message of `message.peer` and return its tensors, of any shape. Raises ExchangeError."""
        start = time.monotonic()
        with self.waiting:
            found = self.mailboxes.take(key, self.deadline)
        if found is None:
            text = (
                f"rank {self.rank} at {where}: rank {message.peer} has not answered rank {self.rank} for "
                f"{time.monotonic() - start:.3g} s; expected from it: {_shapes(message.specs)}"
            )
            self.mailboxes.fail(text)  # or the others would wait in turn for this rank, which has given up
            raise ExchangeError(text)
        if found.copied is not None:
            device_module(self.device.type).current_stream(self.device).wait_event(found.copied)
        sent = [TensorSpec.of(x) for x in found.tensors]
        if [each.num_bytes for each in sent] != [each.num_bytes for each in message.specs]:
            text = (
                f"rank {self.rank} at {where}: rank {message.peer} sent {_shapes(sent)}, but "
                f"{_shapes(message.specs)} were expected: the ranks do not run the same exchanges"
            )
            self.mailboxes.fail(text)
            raise ExchangeError(text)
        tensors = [_as(x, spec) for x, spec in zip(found.tensors, message.specs, strict=True)]
        if message.into is None:
            return tensors
        return [x if into is None else into.copy_(x) for x, into in zip(tensors, message.into, strict=True)]

    def _recorded(self) -> Any:
        """Return an event after what this thread has put in the stream of its device; None on a CPU."""
        if not is_accelerator(str(self.device)):
            return None
        return device_module(self.device.type).current_stream(self.device).record_event()

    def settle(self, where: str) -> None:
        """See `Transport`: a wait for a message blocks the thread."""
        self.check(where)

    def poison(self, reason: str) -> None:
        """See `Poisonable`. All ranks are told, since the others wait for this one."""
        super().poison(reason)
        self.mailboxes.fail(reason)

    def recover(self) -> None:
        """Allow exchanges again, from the first message on, once `Mailboxes.clear` has removed what was left over."""
        super().recover()
        self._expected.clear()

    def close(self) -> None:
        """Nothing is open. Idempotent."""


class ThreadWork(Work[Messages]):
    """Messages that are taken out when they are waited for; outgoing ones have been handed over already."""

    def __init__(self, transport: ThreadTransport, incoming: Sequence[Incoming], where: str) -> None:
        super().__init__(incoming, where)
        self._transport, self._keys = transport, [transport.number(message) for message in incoming]

    def _receive(self, index: int) -> list[Tensor]:
        return self._transport.fetch(self.incoming[index], self._keys[index], self.where)


def _as(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return x [...] as the receiver reads the same bytes."""
    if TensorSpec.of(x) == spec:
        return x
    return x.contiguous().reshape(-1).view(torch.uint8).view(spec.dtype).view(spec.shape)


def _shapes(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.shape} {spec.dtype}" for spec in specs) or "nothing"
