"""How ranks of one host that nobody of ours has started find each other: by a name, checked by the kernel.

    rank 0      listens at an abstract socket, which is no file and is gone with its process
    the others  connect to it, as soon as it is there, and say which rank they are
    rank 0      when all have come, closes its door and says so to each

Each side asks the kernel whose process the other is (SO_PEERCRED) and talks to its own user only. Linux only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from patchpar.errors import LaunchError

CONFIG = struct.Struct("<II")  # rank, number of ranks
WELCOME = b"w"
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
RETRY_SECONDS = 0.02
HANDSHAKE_SECONDS = 5.0  # for a process that has connected to say who it is
JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def name_of_job(world_size: int) -> str | None:
    """A name for the job that this process is a rank of, the same on all; None if some may be on other hosts."""
    known = sys.platform == "linux" and os.environ.get("MASTER_PORT")
    if not known or os.environ.get("LOCAL_WORLD_SIZE") != str(world_size):
        return None
    facts = [str(os.geteuid()), *(os.environ.get(name, "") for name in JOB)]
    return "patchpar-" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def this_host() -> str:
    """What only this host has, as far as sockets with a name reach; empty where there are none."""
    if sys.platform != "linux":
        return ""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot.read_text().strip()} {network.readlink()} {os.geteuid()}"


def meet(name: str, rank: int, world_size: int, deadline: float) -> dict[int, socket.socket]:
    """Connected sockets: rank 0's to each other rank, theirs to rank 0. To be called by all, equally often.

    `deadline`: seconds for all to come. Raises LaunchError.
    """
    give_up = time.monotonic() + deadline
    if rank == 0:
        return _received("\0" + name, world_size, give_up, deadline)
    return {0: _called("\0" + name, rank, world_size, give_up, deadline)}


def _received(address: str, world_size: int, give_up: float, deadline: float) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX) as comm:
            comm.bind(address)
            comm.listen(world_size)
            while len(links) < world_size - 1:
                comm.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
                _take_in(comm.accept()[0], links, world_size)
                if time.monotonic() > give_up:
                    raise TimeoutError
        for link in links.values():
            link.sendall(WELCOME)
            link.settimeout(None)
    except OSError as error:
        _close(links)
        if isinstance(error, TimeoutError):
            missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in links)
            raise LaunchError(f"rank {missing} has not come within {deadline:g} s: did it leave, or fail?") from error
        raise LaunchError(f"rank 0 cannot be found at {address[1:]!r} by the others: {error.strerror}") from error
    return links


def _take_in(link: socket.socket, links: dict[int, socket.socket], world_size: int) -> None:
    """Keep the link of a rank that was missing; close that of anybody else."""
    with contextlib.suppress(OSError, struct.error):
        link.settimeout(HANDSHAKE_SECONDS)
        if user_of(link) == os.geteuid():
            rank, world = CONFIG.unpack(link.recv(CONFIG.size))
            if world == world_size and 0 < rank < world and rank not in links:
                links[rank] = link
                return
    link.close()


def _called(address: str, rank: int, world_size: int, give_up: float, deadline: float) -> socket.socket:
    while True:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
        try:
            link.connect(address)
            _introduce(link, rank, world_size)
            return link
        except ConnectionRefusedError as error:  # it does not listen yet
            link.close()
            if time.monotonic() > give_up:
                raise LaunchError(f"rank 0 has not come within {deadline:g} s: did it leave, or fail?") from error
            time.sleep(RETRY_SECONDS)
        except BaseException:
            link.close()
            raise


def _introduce(link: socket.socket, rank: int, world_size: int) -> None:
    """Say who we are, if it is a process of our own user, and wait for all others to come."""
    user = user_of(link)
    if user != os.geteuid():
        raise LaunchError(f"a process of user {user} answers in the place of rank 0: start the job again")
    try:
        link.sendall(CONFIG.pack(rank, world_size))
        answer = link.recv(len(WELCOME))
        link.settimeout(None)
    except OSError as error:
        raise LaunchError(f"rank {rank} cannot join rank 0: {error}") from error
    if answer != WELCOME:
        raise LaunchError(f"rank 0 has refused rank {rank}, or has left: there may be two of that rank")


def user_of(link: socket.socket) -> int:
    """The user id of the process at the other end of a unix socket, as the kernel knows it."""
    option = getattr(socket, "SO_PEERCRED")  # noqa: B009  there is none for mypy on other systems
    _, user, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, option, CREDENTIALS.size))
    return int(user)


def _close(links: Mapping[int, socket.socket]) -> None:
    for link in links.values():
        link.close()
