"""Choose a transport and connect it. Collective: every rank calls it, equally often."""

import contextlib
import errno
import logging
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import torch
import torch.distributed as dist

from patchpar.comm.transport.message import Transport
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import ExchangeError
from patchpar.launch.accelerators import HOST_BACKENDS, group_backend
from patchpar.launch.executor import RankContext

T = TypeVar("T", bound=Transport)
PEER = struct.Struct("<I")  # the rank at the other end of the socket that is sent with it
HERE = b"h"  # sent by each rank to each other, so that a rank that did not connect is noticed now and not much later
CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux; elsewhere only a later exec would inherit
RETRY_SECONDS = 0.01

log = logging.getLogger(__name__)


def connect(endpoint: RankContext, *, through: str = "auto") -> Transport:
    """Connect this rank with all others. `endpoint.wait_limit` bounds every wait, here and of the transport.

    `through` is "auto", "shared_memory" or "torch" (the default group of torch.distributed, which must be initialised).
    "auto" is shared memory where all ranks are on one host and do not use NCCL. Raises ExchangeError, also where a rank
    does not connect: it would read the sockets it did not take as those of the next connection.
    """
    device = torch.device(endpoint.device)
    if through == "torch" or (through == "auto" and (endpoint.links is None or _over_nccl(device))):
        return TorchTransport(device, endpoint.wait_limit)
    if endpoint.links is None:
        raise ExchangeError(
            f"rank {endpoint.rank}: shared memory needs all ranks on one host, started without torch.distributed: use "
            f"through='torch'"
        )
    with endpoint.waiting:
        lines = _handed_out(endpoint, endpoint.links) if endpoint.rank == 0 else _taken(endpoint, endpoint.links[0])
        _greet(endpoint, lines)
    return SharedMemoryTransport(endpoint.rank, lines, device, endpoint.wait_limit)


def alone(endpoint: RankContext) -> Transport:
    """Return a transport for a single rank."""
    return SharedMemoryTransport(0, {}, torch.device(endpoint.device), endpoint.wait_limit)


def watched(transport: T, rank: RankContext) -> T:
    """Return the same transport with the wait limit of `rank`, reporting its waits there."""
    transport.deadline, transport.waiting = rank.wait_limit, rank.waiting
    return transport


def form_groups(transport: Transport, sets: Sequence[tuple[int, ...]], *, symmetric_memory: bool) -> None:
    """Prepare operations of these sets of ranks, where the transport has any; see `Collectives.form`. Collective."""
    if transport.collectives is not None:
        transport.collectives.form(sets, symmetric_memory=symmetric_memory)
    elif symmetric_memory:
        log.warning("no symmetric memory: these ranks exchange through memory of the host, as they have no GPU each")


def _over_nccl(device: torch.device) -> bool:
    return device.type != "cpu" and dist.is_initialized() and group_backend(device) not in HOST_BACKENDS


def _handed_out(endpoint: RankContext, links: Mapping[int, socket.socket]) -> dict[int, socket.socket]:
    """On rank 0: make a socket pair for every two ranks and send both their ends. Return the ends of rank 0."""
    own: dict[int, socket.socket] = {}
    give_up = time.monotonic() + endpoint.wait_limit
    try:
        for lower, higher in combinations(range(endpoint.world_size), 2):
            ends = socket.socketpair()
            with ends[1]:
                _send(links[higher], higher, ends[1], lower, give_up)
            if lower == 0:
                own[higher] = ends[0]
                continue
            with ends[0]:
                _send(links[lower], lower, ends[0], higher, give_up)
    except (OSError, ExchangeError) as error:
        for line in own.values():
            line.close()
        raise ExchangeError(f"rank 0 cannot connect the ranks: {error}") from error
    return own


def _send(link: socket.socket, rank: int, end: socket.socket, peer: int, give_up: float) -> None:
    """Send `rank` its end of the pair with `peer`. Raises ExchangeError if it does not take it in time."""
    while True:
        link.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
        try:
            socket.send_fds(link, [PEER.pack(peer)], [end.fileno()])  # so few bytes are sent whole or not at all
            return
        except OSError as error:
            # The kernel limits the number of descriptors that have been sent and not received.
            late = time.monotonic() > give_up
            if error.errno != errno.ETOOMANYREFS or late:
                silent = late or isinstance(error, TimeoutError)
                raise ExchangeError(f"rank {rank} {'does not answer' if silent else 'is gone'} ({error})") from error
            time.sleep(RETRY_SECONDS)


def _taken(endpoint: RankContext, link: socket.socket) -> dict[int, socket.socket]:
    """On the other ranks: receive one socket to each peer from rank 0."""
    lines: dict[int, socket.socket] = {}
    link.settimeout(endpoint.wait_limit)
    try:
        while len(lines) < endpoint.world_size - 1:
            data, descriptors, _, _ = socket.recv_fds(link, PEER.size, 1, CLOSE_ON_EXEC)
            if not data:
                raise ConnectionResetError("it has closed the connection")
            lines[PEER.unpack(data)[0]] = socket.socket(fileno=descriptors[0])
    except OSError as error:
        for line in lines.values():
            line.close()
        state = f"has not answered for {endpoint.wait_limit:g} s" if isinstance(error, TimeoutError) else "is gone"
        raise ExchangeError(f"rank {endpoint.rank} cannot connect to the others: rank 0 {state} ({error})") from error
    return lines


def _greet(endpoint: RankContext, lines: Mapping[int, socket.socket]) -> None:
    """Wait until every rank has connected. Raises ExchangeError, with all lines closed."""
    give_up = time.monotonic() + endpoint.wait_limit
    for line in lines.values():
        with contextlib.suppress(OSError):  # a rank that is gone is found below
            line.sendall(HERE)
    for peer, line in lines.items():
        try:
            line.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
            if not line.recv(len(HERE)):
                raise ConnectionResetError("it has closed the connection")
        except OSError as error:
            raise _missed(endpoint, peer, lines, error) from error


def _missed(endpoint: RankContext, peer: int, lines: Mapping[int, socket.socket], error: OSError) -> ExchangeError:
    """Close all sockets and return the error for a rank that does not connect."""
    for line in lines.values():
        line.close()
    state = f"has not connected within {endpoint.wait_limit:g} s" if isinstance(error, TimeoutError) else "is gone"
    return ExchangeError(
        f"rank {endpoint.rank} cannot connect to the others: rank {peer} {state} ({error}); every rank has to connect, "
        "also one that takes no part in what follows"
    )
