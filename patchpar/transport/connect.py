"""Choose a transport and connect it. Collective: every rank of the default group calls it once."""

import socket
import struct
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from patchpar.errors import ExchangeError
from patchpar.transport.message import Transport
from patchpar.transport.shared_memory import SharedMemoryTransport
from patchpar.transport.torch_p2p import TorchTransport

HELLO = struct.Struct("<I")


def connect(device: torch.device | str, *, deadline: float, through: str = "auto") -> Transport:
    """Connect this rank with all ranks of the default group.

    `through` is "auto", "shared_memory" or "torch": auto takes shared memory when all ranks live on one host and the
    group's backend is gloo. `deadline` in seconds bounds every wait. Raises ExchangeError.
    """
    device = torch.device(device)
    if through == "torch" or (through == "auto" and not _one_host_over_gloo()):
        return TorchTransport(device, deadline)
    return SharedMemoryTransport(dist.get_rank(), _links(deadline), device, deadline)


def alone(device: torch.device | str, *, deadline: float) -> Transport:
    """For a rank that has no others."""
    return SharedMemoryTransport(0, {}, torch.device(device), deadline)


def _one_host_over_gloo() -> bool:
    if dist.get_backend() != "gloo":
        return False
    boot = Path("/proc/sys/kernel/random/boot_id")
    mine = (socket.gethostname(), boot.read_text() if boot.exists() else "")
    hosts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, mine)
    return len(set(hosts)) == 1


def _links(deadline: float) -> dict[int, socket.socket]:
    """One connected socket per other rank: the higher rank calls, the lower one answers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory(prefix="patchpar-") as folder, socket.socket(socket.AF_UNIX) as door:
        path = str(Path(folder) / str(rank))
        door.bind(path)
        door.listen(world)
        door.settimeout(deadline)
        paths: list[object] = [None] * world
        dist.all_gather_object(paths, path)
        links = {peer: _call(str(paths[peer]), rank, deadline) for peer in range(rank)}
        for _ in range(world - 1 - rank):
            link, _address = door.accept()
            (peer,) = HELLO.unpack(link.recv(HELLO.size, socket.MSG_WAITALL))
            links[peer] = link
        dist.barrier()
    return links


def _call(path: str, rank: int, deadline: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    give_up = time.monotonic() + deadline
    while True:
        try:
            link.connect(path)
            link.send(HELLO.pack(rank))
            return link
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > give_up:
                raise ExchangeError(
                    f"rank {rank} cannot reach {path} within {deadline:g} s: {error.strerror}"
                ) from error
            time.sleep(0.01)
