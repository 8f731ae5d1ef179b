"""Choose a transport and connect it. Collective: every rank of a call does so, equally often."""

import contextlib
import logging
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.link_transport import LinkTransport
from patchpar.comm.transport.message import Transport
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import ExchangeError, LaunchError
from patchpar.launch.accelerators import HOST_BACKENDS, card_id, default_backend, group_backend
from patchpar.launch.executor import RankContext
from patchpar.launch.links import RETRY_SECONDS, RankLink
from patchpar.launch.nccl_failures import NCCL

T = TypeVar("T", bound=Transport)
HERE = b"h"  # sent by each rank to each other, so that a rank that did not connect is noticed now and not much later
GROUPS = "the groups of all ranks"
log = logging.getLogger(__name__)


def connect(endpoint: RankContext, *, through: str = "auto", ranks: Collection[int] | None = None) -> Transport:
    """Connect this rank with the others of `ranks` (default: all). `endpoint.wait_limit` bounds every wait.

    `through` is "auto", "shared_memory", "torch" (the default group of torch.distributed, which must be initialised,
    and of which all ranks connect) or "device" (on GPUs shared memory that `form_links` extends by links from device to
    device, else shared memory). "auto" is shared memory, between nodes TCP, where ranks have links and do not use NCCL.
    Raises ExchangeError, also where a rank does not connect: it would read the sockets it did not take as those
    of the next connection.
    """
    device = torch.device(endpoint.device)
    if through == "torch" or (through == "auto" and (endpoint.links is None or _over_nccl(device))):
        return TorchTransport(device, endpoint.wait_limit)
    host = SharedMemoryTransport(endpoint.rank, {}, device, endpoint.wait_limit)
    extend(host, endpoint, range(endpoint.world_size) if ranks is None else ranks)
    has_links = through == "device" and default_backend(device.type) == NCCL
    return LinkTransport(host, NCCL, card_id(endpoint.device)) if has_links else host


def transport_of_host(transport: Transport) -> Transport:
    """Return the transport for what stays in host memory: `transport` itself unless it has another one for that."""
    return transport.host if isinstance(transport, LinkTransport) else transport


def extend(transport: Transport, endpoint: RankContext, ranks: Collection[int]) -> bool:
    """Connect with those of `ranks` to which there is no connection yet, or none any more. Collective of `ranks`.

    Return whether one had ended, so that messages of before may be lost. Raises ExchangeError as `connect` does.
    """
    if isinstance(transport, LinkTransport):
        has_ended = extend(transport.host, endpoint, ranks)
        if has_ended:
            transport.poison("a connection to another rank had ended")
        return has_ended
    if not isinstance(transport, SharedMemoryTransport):
        return False  # connects all ranks
    if transport.has_ended_ones:
        transport.recover()
    states = {peer: transport.state_of(peer) for peer in ranks if peer != endpoint.rank}
    missing = [peer for peer, state in states.items() if state != "open"]
    if missing and endpoint.links is None:
        raise ExchangeError(
            f"rank {endpoint.rank}: shared memory needs all ranks on one host, started without torch.distributed: use "
            f"through='torch'"
        )
    with endpoint.waiting:
        transport.add(_connect_pairs(endpoint, endpoint.links or {}, missing))
    return "ended" in states.values()


def alone(endpoint: RankContext) -> Transport:
    """Return a transport for a single rank."""
    return SharedMemoryTransport(0, {}, torch.device(endpoint.device), endpoint.wait_limit)


def connect_group(device: torch.device, deadline: float, group: Any = None) -> tuple[Transport, tuple[int, ...]]:
    """Return a transport through torch.distributed, and the global ranks of `group` (default: of all), ascending.

    Collective of all ranks of the default group, each with its own group. Raises LaunchError without one, and
    ExchangeError.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise LaunchError(
            "torch.distributed is not initialised: start this with torchrun and call "
            "torch.distributed.init_process_group() first, or use Team, which has all devices in one process"
        )
    world = dist.get_world_size()
    ranks = tuple(range(world)) if group is None else tuple(sorted(dist.get_process_group_ranks(group)))
    transport = TorchTransport(device, deadline)
    if transport.collectives is not None:  # every rank has to form the groups of all
        own = torch.zeros(world, dtype=torch.int64, device=device)
        own[list(ranks)] = 1
        gathered = own.new_empty(world, world)
        transport.collectives.all_gather(tuple(range(world)), own, gathered, (), GROUPS).wait()
        transport.settle(GROUPS)
        found = [tuple(x.nonzero().flatten().tolist()) for x in gathered]
        transport.collectives.form([each for each in dict.fromkeys(found) if len(each) > 1])
    return transport, ranks


def watched(transport: T, rank: RankContext) -> T:
    """Return the same transport with the wait limit of `rank`, reporting its waits there."""
    transport.deadline, transport.waiting = rank.wait_limit, rank.waiting
    return transport


def uses_host_memory(transport: Transport) -> bool:
    """Whether ranks of one host exchange through memory that both map. The same on all ranks."""
    return isinstance(transport, SharedMemoryTransport)


def register_memory(transport: Transport, descriptor: int, memory: Tensor) -> None:
    """Let the other ranks read messages where they lie in `memory` [bytes] of a file, where the transport can.

    What is sent from it does not change until `unregister_memory`.
    """
    if isinstance(transport, SharedMemoryTransport):
        transport.register(descriptor, memory)


def unregister_memory(transport: Transport, memory: Tensor) -> None:
    """End what `register_memory` began for `memory` [bytes]. Idempotent."""
    if isinstance(transport, SharedMemoryTransport):
        transport.unregister(memory)


def form_groups(transport: Transport, sets: Sequence[tuple[int, ...]], *, symmetric_memory: bool) -> None:
    """Prepare operations of these sets of ranks, where the transport has any; see `Collectives.form`. Collective.

    Raises ExchangeError where another rank does not come to it; the transport is not used again.
    """
    if transport.collectives is not None:
        try:
            transport.collectives.form(sets, symmetric_memory=symmetric_memory)
        except ExchangeError as error:
            transport.poison(str(error))
            raise
    elif symmetric_memory:
        log.warning("no symmetric memory: these ranks exchange through memory of the host, as they have no GPU each")


def _over_nccl(device: torch.device) -> bool:
    return device.type != "cpu" and dist.is_initialized() and group_backend(device) not in HOST_BACKENDS


def _connect_pairs(
    endpoint: RankContext, links: Mapping[int, RankLink], peers: Sequence[int]
) -> dict[int, socket.socket]:
    """Return a line to each of `peers`, which all do the same. Raises ExchangeError, with all lines closed."""
    lines: dict[int, socket.socket] = {}
    give_up = time.monotonic() + endpoint.wait_limit
    peer = -1
    try:
        for peer in sorted(peers, key=lambda peer: (peer < endpoint.rank, peer)):  # the higher ones wait for this rank
            make = links[peer].offer if endpoint.rank < peer else links[peer].accept
            lines[peer] = make(give_up)
        for line in lines.values():
            with contextlib.suppress(OSError):  # a rank that is gone is found below
                line.sendall(HERE)
        for peer in lines:
            line = lines[peer]
            line.settimeout(max(RETRY_SECONDS, give_up - time.monotonic()))
            if not line.recv(len(HERE)):
                raise ConnectionResetError("it has closed the connection")
    except OSError as error:
        for line in lines.values():
            line.close()
        state = f"has not connected within {endpoint.wait_limit:g} s" if isinstance(error, TimeoutError) else "is gone"
        raise ExchangeError(
            f"rank {endpoint.rank} cannot connect to the others: rank {peer} {state} ({error}); every rank of a call "
            "has to connect, also one that takes no part in what follows"
        ) from error
    return lines
