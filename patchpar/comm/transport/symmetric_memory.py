"""Small exchanges between GPUs of one host by one kernel, in memory that every rank can write on every other.

That memory is torch's symmetric memory (torch.distributed._symmetric_memory). The kernel writes this rank's parts to
the other ranks, signals, waits for their signals, and copies what has come, all in the current stream: one launch
instead of a collective of NCCL with its stream and events. Nothing of it is decided by the process, so that a graph
repeats it.

Where torch, the devices or the hosts do not allow it, and where an exchange is large, NCCL is used as without it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.message import FlatParts
from patchpar.comm.transport.stream_waits import ENQUEUED
from patchpar.launch.accelerators import timing_events
from patchpar.launch.rendezvous import this_host

T = TypeVar("T")
SLOT = 2**19  # bytes: of what a rank sends another in one exchange; edge rows of SDXL at 2048 x 2048 are 320 KiB
CHUNKS = 8  # programs for each pair of ranks
BLOCK = 1024  # words that a program copies at once
SPINS = 64  # questions to the device's memory before one to the host's
SIGNAL_BYTES = 4096
WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
TRIALS = 50  # exchanges by which ranks find out whether their memory works
TRIAL_SECONDS = 20.0  # for all of them
POLL = 1e-3

log = logging.getLogger(__name__)


class MappedMemory(NamedTuple):
    """This rank's `memory` [bytes], zeros, and the `addresses` here of all ranks'. `handle` keeps them."""

    memory: Tensor
    addresses: Sequence[int]
    handle: Any


Allocate = Callable[[int, torch.device], Tensor]
"""Returns memory [bytes] of zeros that other ranks can map. Raises RuntimeError where there is none."""

Rendezvous = Callable[[Tensor, dist.ProcessGroup], MappedMemory]
"""Maps the memory [bytes] of all ranks of a group, which call it together. Raises RuntimeError where that cannot be."""


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Return torch's symmetric memory [bytes], see `Allocate`. Raises RuntimeError where there is none."""
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
    torch.get_device_module(device.type).synchronize(device)  # zeros are there before any rank knows the address
    return memory


def rendezvous(memory: Tensor, group: dist.ProcessGroup) -> MappedMemory:
    """Return torch's symmetric memory [bytes] of all ranks. Raises RuntimeError where that cannot be."""
    import torch.distributed._symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(memory, group)
    found = [handle.get_buffer(rank, memory.shape, torch.uint8) for rank in range(group.size())]
    if found[group.rank()].data_ptr() != memory.data_ptr():
        raise RuntimeError("symmetric memory begins elsewhere than its tensor")
    return MappedMemory(memory, [x.data_ptr() for x in found], (handle, found))


def why_not(device: torch.device) -> str:
    """Return why this process can have no symmetric memory on `device`; empty where it may."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        backend = symmetric_memory.get_backend(device)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"this build of torch has no symmetric memory for {device.type} ({error})"
    return "" if backend else f"this build of torch has no symmetric memory for {device.type}"


class PeerMemory:
    """Exchanges between ranks of one set, of which this is number `index`, through `mapped` memory."""

    def __init__(self, mapped: MappedMemory, index: int) -> None:
        self._mapped, self._index, self.size = mapped, index, len(mapped.addresses)
        device = mapped.memory.device
        self._addresses = torch.tensor(list(mapped.addresses), dtype=torch.int64).to(device)
        self._rounds = torch.zeros(self.size * CHUNKS, dtype=torch.int32, device=device)
        # In memory of the host, which a kernel can read: no stream has to get to it.
        self._given_up = torch.zeros(1, dtype=torch.int32, pin_memory=device.type != "cpu")
        self._parts: dict[tuple[int, ...], tuple[Tensor, torch.dtype]] = {}

    @staticmethod
    def bytes_for(ranks: int) -> int:
        """Return the bytes of memory on each of so many ranks."""
        return SIGNAL_BYTES + 2 * ranks * SLOT

    def all_gather(self, own: Tensor, rows: Tensor) -> Sequence[Any]:
        """Begin to gather `own` [...] of at most SLOT bytes into `rows` [P, ...], both contiguous."""
        num_bytes = own.numel() * own.element_size()
        return self._exchange(own, [0] * self.size, [num_bytes] * self.size, rows, [num_bytes] * self.size)

    def all_to_all(self, own: FlatParts, into: FlatParts) -> Sequence[Any]:
        """Begin to send each rank its part of `own`, of at most SLOT bytes, and to receive those of `into`."""
        sent, received = ([size * x.buffer.element_size() for size in x.sizes] for x in (own, into))
        return self._exchange(own.buffer, list(accumulate(sent[:-1], initial=0)), sent, into.buffer, received)

    def give_up(self) -> None:
        """End all exchanges that wait for other ranks, with whatever is in memory. Nothing can be exchanged again."""
        self._given_up.fill_(1)

    def _exchange(
        self, sent: Tensor, starts: Sequence[int], sizes: Sequence[int], into: Tensor, received: Sequence[int]
    ) -> Sequence[Any]:
        """Launch the kernel; `starts` and sizes in bytes."""
        first = int(sent.storage_offset()) * sent.element_size(), int(into.storage_offset()) * into.element_size()
        key = (*first, *starts, *sizes, *received)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._table(key, starts, sizes, received)
        self._launch(sent, into, *found)
        return (ENQUEUED,)

    def _table(
        self, numbers: Sequence[int], starts: Sequence[int], sizes: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, torch.dtype]:
        """Return the parts [ranks, 4] in words, and the widest words of which all of these numbers of bytes are."""
        word = next(each for each in WORDS if all(number % each.itemsize == 0 for number in numbers))
        into = accumulate(received[:-1], initial=0)
        rows = list(zip(starts, sizes, into, received, strict=True))
        table = torch.tensor(rows, dtype=torch.int64) // word.itemsize
        return table.to(self._mapped.memory.device, non_blocking=True), word

    def _launch(self, sent: Tensor, received: Tensor, parts: Tensor, word: torch.dtype) -> None:
        from patchpar.comm.transport.programs.peer_exchange import INTEGERS, peer_exchange_program

        peer_exchange_program[(self.size, CHUNKS)](
            sent,
            received,
            self._addresses,
            parts,
            self._rounds,
            self._given_up,
            self._index,
            SIGNALS=SIGNAL_BYTES,
            SLOT=SLOT,
            BLOCK=BLOCK,
            SPINS=SPINS,
            WORD=INTEGERS[word.itemsize],
            num_warps=8,
        )


def works(peers: PeerMemory, device: torch.device, deadline: float = TRIAL_SECONDS) -> bool:
    """Return whether exchanges of many sizes bring what the other ranks sent, within `deadline` seconds.

    All ranks call it together. Where a rank does not answer, all exchanges are given up.
    """
    wrong = torch.zeros(1, dtype=torch.bool, device=device)
    for trial in range(TRIALS):
        count = 1 + (SLOT // 4 - 1) * trial // (TRIALS - 1)
        numbers = torch.arange(count, dtype=torch.int32, device=device)
        own = numbers + 1000 * trial + peers._index
        rows = torch.empty(peers.size, count, dtype=torch.int32, device=device)
        peers.all_gather(own, rows)
        ranks = torch.arange(peers.size, dtype=torch.int32, device=device).unsqueeze(1)
        wrong |= (rows != numbers + 1000 * trial + ranks).any()
    end = timing_events(device.type)()
    end.record()
    give_up = time.monotonic() + deadline
    while not end.query():
        if time.monotonic() > give_up:
            peers.give_up()
            end.synchronize()  # no rank frees memory that the kernels of another still write
            return False
        time.sleep(POLL)
    return not bool(wrong)


def _tried(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `make` returns; or None and what torch says: too little memory, no access between these devices."""
    try:
        return make(), ""
    except RuntimeError as error:
        return None, str(error)


def formed(
    ranks: tuple[int, ...],
    group: dist.ProcessGroup,
    device: torch.device,
    gather: Callable[[Tensor], Tensor],
    allocate: Allocate = allocate,
    rendezvous: Rendezvous = rendezvous,
) -> PeerMemory | None:
    """Return memory between these ranks once it has been tried; None where one of them has none, which the log says.

    All ranks call it together. `gather`: gathers a tensor [N] of each into [P, N].
    """

    def agreed(reason: str) -> bool:
        """Whether no rank has a reason, and all are of one host."""
        own = torch.tensor([int(bool(reason)), crc32(this_host().encode())], dtype=torch.int64).to(device)
        found = gather(own).tolist()
        failed = [rank for rank, (has_reason, _) in zip(ranks, found, strict=True) if has_reason]
        if len({host for _, host in found}) > 1:
            reason, failed = "ranks are on several hosts", failed or list(ranks)
        if failed:
            log.warning("small exchanges go through NCCL: %s", reason or f"no symmetric memory on ranks {failed}")
        return not failed

    if not agreed(why_not(device)):
        return None
    memory, reason = _tried(partial(allocate, PeerMemory.bytes_for(len(ranks)), device))
    if not agreed(reason) or memory is None:  # else ranks with memory would wait in the rendezvous for one without
        return None
    mapped = partial(rendezvous, memory, group)
    found, reason = _tried(lambda: PeerMemory(mapped(), group.rank()))
    if not agreed(reason) or found is None:
        return None
    reason = "" if works(found, device) else "what was written to the memory of another rank has not come"
    return found if agreed(reason) else None
