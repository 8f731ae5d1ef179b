"""Memory of the host that several ranks of it map: a file without a name, opened by others through /proc."""

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.comm.transport.arena import map_segment
from patchpar.launch.anonymous_file import anonymous_file
from patchpar.launch.file_pages import take_pages
from patchpar.launch.rendezvous import this_host
from patchpar.shard.verification import every_rank_has, uncounted


class HostSegment:
    """Memory of this rank, `memory` [bytes], that other processes of the host can open until `forget`."""

    descriptor = -1  # where none could be opened

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = anonymous_file("patchpar-weights")
        os.ftruncate(self.descriptor, max(num_bytes, mmap.PAGESIZE))
        self.memory = map_segment(self.descriptor)

    def populate(self, part: Tensor) -> None:
        """Take the pages of `part` [bytes] of it at once, where the system can: one by one takes twice as long."""
        take_pages(part.data_ptr(), part.numel())

    @property
    def address(self) -> bytes:
        """What `opened` needs in another process."""
        found = os.fstat(self.descriptor)
        return json.dumps([this_host(), os.getpid(), self.descriptor, found.st_dev, found.st_ino]).encode()

    def forget(self) -> None:
        """Let no other process open it any more. Mappings stay valid. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        self.forget()


def opened(address: bytes, *, own_writes: bool = False) -> Tensor | None:
    """Return the memory [bytes] of another process's segment; None if it is on another host or may not be opened.

    `own_writes`: what this process writes to it, no other process sees.
    """
    host, process, number, *file = json.loads(address)
    if not host or host != this_host():
        return None
    try:
        descriptor = os.open(Path(f"/proc/{process}/fd/{number}"), os.O_RDWR)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        return map_segment(descriptor, own_writes=own_writes) if [found.st_dev, found.st_ino] == file else None
    finally:
        os.close(descriptor)


def segments_of_all(own: HostSegment, mesh: AxisComm, *, own_writes: bool = False) -> Sequence[Tensor] | None:
    """Return the memory [bytes] of all ranks of the axis in order; None, on all of them, where one cannot be opened.

    `own_writes`: what this rank writes to it, no other rank sees. Collective. Raises ExchangeError.
    """
    comm, axis = mesh
    with uncounted(comm):
        addresses = AllGather(comm, axis, "verify", "host memory").of_bytes(own.address)
    shared = {} if own_writes else {axis.rank: own.memory}
    found = [
        shared[rank] if rank in shared else opened(address, own_writes=own_writes)
        for rank, address in enumerate(addresses)
    ]
    memories = [memory for memory in found if memory is not None]
    all_opened = every_rank_has(mesh, "host memory", len(memories) == axis.size)
    own.forget()
    return memories if all_opened else None


def all_can_map(mesh: AxisComm) -> bool:
    """Whether the ranks of the axis can map each other's memory. Collective. Raises ExchangeError."""
    comm, axis = mesh
    if comm.transport.device.type == "meta":  # recorded as ranks of one host
        return True
    probe = HostSegment(1)
    probe.memory[0] = axis.rank
    found = segments_of_all(probe, mesh)
    right = found is not None and torch.stack([memory[0] for memory in found]).tolist() == list(range(axis.size))
    return every_rank_has(mesh, "host memory", right)
