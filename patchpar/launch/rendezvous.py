"""Connect ranks of one host that torchrun has started, through an abstract Unix socket. Linux only.

    rank 0      listens at an abstract socket, which is no file and disappears with its process
    the others  connect to it as soon as it exists, and send their rank
    rank 0      closes the listening socket when all have connected, and confirms to each
    rank 0      makes a socket pair for every two of the others, and sends both their ends

Each side checks the user id of the other process with the kernel (SO_PEERCRED) and accepts its own user only.
"""

import contextlib
import hashlib
import itertools
import os
import socket
import struct
import sys
import time
from pathlib import Path

from patchpar.errors import LaunchError
from patchpar.launch.links import PeerLink, receive_descriptor, send_descriptor

CONFIG = struct.Struct("<II")  # rank, number of ranks
PEER = struct.Struct("<I")  # the rank at the other end of the socket that is sent with it
WELCOME = b"w"
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
RETRY_SECONDS = 0.02
HANDSHAKE_SECONDS = 5.0  # for a connected process to send its rank
JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def name_of_job(world_size: int) -> str | None:
    """Return a socket name for this torchrun job, equal on all ranks; None if ranks may run on other hosts."""
    known = sys.platform == "linux" and os.environ.get("MASTER_PORT")
    if not known or os.environ.get("LOCAL_WORLD_SIZE") != str(world_size):
        return None
    facts = [str(os.geteuid()), *(os.environ.get(name, "") for name in JOB)]
    return "patchpar-" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def this_host() -> str:
    """Return an id of this host, network namespace and user; empty where there are no abstract sockets."""
    if sys.platform != "linux":
        return ""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot.read_text().strip()} {network.readlink()} {os.geteuid()}"


def meet(name: str, rank: int, world_size: int, deadline: float) -> dict[int, socket.socket]:
    """Return sockets from rank 0 to each other rank. Collective, within `deadline` seconds. Raises LaunchError."""
    give_up = time.monotonic() + deadline
    if rank == 0:
        return _accept_all("\0" + name, world_size, give_up, deadline)
    return {0: _connect("\0" + name, rank, world_size, give_up, deadline)}


def linked(name: str, rank: int, world_size: int, deadline: float) -> dict[int, PeerLink]:
    """Return this rank's links to all others. Collective, within `deadline` seconds. Raises LaunchError."""
    ends, give_up = meet(name, rank, world_size, deadline), time.monotonic() + deadline
    try:
        if rank == 0:
            _hand_out(ends, world_size, give_up)
        while len(ends) < world_size - 1:
            data, descriptor = receive_descriptor(ends[0], PEER.size, give_up)
            ends[PEER.unpack(data)[0]] = socket.socket(fileno=descriptor)
    except OSError as error:
        for end in ends.values():
            end.close()
        raise LaunchError(f"rank {rank} cannot connect to the others: {error}") from error
    return {peer: PeerLink(rank, peer, end) for peer, end in ends.items()}


def _hand_out(ends: dict[int, socket.socket], world_size: int, give_up: float) -> None:
    for lower, higher in itertools.combinations(range(1, world_size), 2):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send_descriptor(ends[lower], PEER.pack(higher), ours.fileno(), give_up)
            send_descriptor(ends[higher], PEER.pack(lower), theirs.fileno(), give_up)


def _accept_all(address: str, world_size: int, give_up: float, deadline: float) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(world_size)
            while len(links) < world_size - 1:
                listener.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
                _accept_rank(listener.accept()[0], links, world_size)
                if time.monotonic() > give_up:
                    raise TimeoutError
        for link in links.values():
            link.sendall(WELCOME)
            link.settimeout(None)
    except OSError as error:
        for link in links.values():
            link.close()
        if isinstance(error, TimeoutError):
            missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in links)
            raise LaunchError(
                f"rank {missing} has not connected within {deadline:g} s: did it exit or fail?"
            ) from error
        raise LaunchError(f"rank 0 cannot connect to the others at {address[1:]!r}: {error.strerror}") from error
    return links


def _accept_rank(link: socket.socket, links: dict[int, socket.socket], world_size: int) -> None:
    """Keep the connection of a missing rank; close any other connection."""
    with contextlib.suppress(OSError, struct.error):
        link.settimeout(HANDSHAKE_SECONDS)
        if user_of(link) == os.geteuid():
            rank, world = CONFIG.unpack(link.recv(CONFIG.size))
            if world == world_size and 0 < rank < world and rank not in links:
                links[rank] = link
                return
    link.close()


def _connect(address: str, rank: int, world_size: int, give_up: float, deadline: float) -> socket.socket:
    while True:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
        try:
            link.connect(address)
            _introduce(link, rank, world_size)
            return link
        except (ConnectionRefusedError, BlockingIOError) as error:  # it does not listen yet, or its queue is full
            link.close()
            if time.monotonic() > give_up:
                raise LaunchError(f"rank 0 has not started within {deadline:g} s: did it exit or fail?") from error
            time.sleep(RETRY_SECONDS)
        except BaseException:
            link.close()
            raise


def _introduce(link: socket.socket, rank: int, world_size: int) -> None:
    """Send this rank to a process of the same user, and wait until all others have connected."""
    user = user_of(link)
    if user != os.geteuid():
        raise LaunchError(f"a process of user {user} listens instead of rank 0: start the job again")
    try:
        link.sendall(CONFIG.pack(rank, world_size))
        answer = link.recv(len(WELCOME))
        link.settimeout(None)
    except OSError as error:
        raise LaunchError(f"rank {rank} cannot connect to rank 0: {error}") from error
    if answer != WELCOME:
        raise LaunchError(f"rank 0 has refused rank {rank}, or has exited: two processes may have that rank")


def user_of(link: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, from the kernel."""
    option = getattr(socket, "SO_PEERCRED")  # noqa: B009  there is none for mypy on other systems
    _, user, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, option, CREDENTIALS.size))
    return int(user)
