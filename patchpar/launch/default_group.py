"""The default group of torch.distributed, where ranks need one: between hosts, and between GPUs that are not shared."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from patchpar.errors import LaunchError
from patchpar.launch.accelerators import (
    HOST_BACKENDS,
    card_id,
    default_backend,
    group_backend,
    is_accelerator,
    kind_of_card,
)
from patchpar.launch.handshake import INTERFACE, interface_between_ranks
from patchpar.launch.nccl_failures import failures_are_raised, name_in_torch
from patchpar.launch.rendezvous import JOB
from patchpar.launch.time_limit import TimedOut, time_limited

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TCP = "tcp://"
LEAST_SECONDS = 0.01  # of a wait: 0 may mean no limit
ANSWER_SECONDS = 2.0  # beyond the deadline, within which torch itself gives up what does not connect
TAKES_LISTENER = "2.8"  # torch: before it only the older store, without libuv, takes a socket that listens
OTHER_PORT = "Choose another one, on all machines (--master-port, or MASTER_PORT)"
_STORES: dict[tuple[int | str | None, ...], Store] = {}
"""torchrun's, by rank and job. They are kept: where torchrun has none, rank 0's process has the one of all ranks."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRank:
    """One rank of a group. `deadline`: seconds within which all ranks have to be there.

    `timeout`: seconds after which torch itself gives an operation up; NCCL ends the process.
    """

    rank: int
    world_size: int
    device: str
    deadline: float
    timeout: float


def form_group(backend: str, store: Store, own: GroupRank) -> None:
    """Make the default group once all ranks are there. Collective. Raises LaunchError.

    On accelerators the ranks connect now and not at the first exchange: a wrong driver or network is a failed start.
    NCCL itself waits without a limit for a rank that does not come, so that it does so in a thread.
    """
    import torch
    import torch.distributed as dist

    values_of_all(store, own, "here", "")
    form = partial(
        dist.init_process_group,
        name_in_torch(backend),
        store=store,
        rank=own.rank,
        world_size=own.world_size,
        timeout=timedelta(seconds=own.timeout),
        device_id=None if backend in HOST_BACKENDS else torch.device(own.device),
    )
    try:
        with failures_are_raised():
            time_limited(own.deadline, form, "patchpar-connect")
    except (RuntimeError, TimedOut) as error:
        why = f"it is not over within {own.deadline:g} s" if isinstance(error, TimedOut) else error
        raise LaunchError(
            f"rank {own.rank} ({own.device}) cannot connect to the others through {backend}: {why}. With "
            f"NCCL_DEBUG=INFO in the environment NCCL says more; {INTERFACE} names the network interface to use"
        ) from error


def values_of_all(store: Store, own: GroupRank, name: str, value: str) -> list[str]:
    """Return what each rank has under this name, of which `value` is this one's. Collective.

    Raises LaunchError, which names the ranks that have not come by the deadline.
    """
    from torch.distributed import DistNetworkError

    keys = [f"patchpar/{name}/{rank}" for rank in range(own.world_size)]
    give_up = time.monotonic() + own.deadline
    try:
        store.set(keys[own.rank], value)
        for key in keys:
            store.wait([key], timedelta(seconds=max(LEAST_SECONDS, give_up - time.monotonic())))
        return [store.get(key).decode() for key in keys]
    except DistNetworkError as error:
        raise LaunchError(f"rank {own.rank} has lost the store in which ranks meet: {error}") from error
    except RuntimeError as error:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise LaunchError(
            f"rank {missing} has not come to the store in which ranks meet within {own.deadline:g} s: did it exit or "
            f"fail? Rank {own.rank} has waited for it"
        ) from error


def store_at(where: str, own: GroupRank, listener: socket.socket | None = None) -> Store:
    """Return the store in which ranks of one caller meet: the file `where`, or "tcp://host:port", which rank 0 opens.

    `listener`: of rank 0, which listens at that port already and is the store's from now on. A wait in it ends at the
    deadline. Raises LaunchError if rank 0 does not open it.
    """
    import torch
    import torch.distributed as dist
    from packaging.version import Version

    timeout = timedelta(seconds=own.deadline)
    if not where.startswith(TCP):
        store: Store = dist.FileStore(where, own.world_size)  # type: ignore[attr-defined]  # it is documented
        store.set_timeout(timeout)
        return store
    host, _, port = where.removeprefix(TCP).rpartition(":")
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]  # it is documented
            host,
            int(port),
            own.world_size,
            own.rank == 0,
            timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
            use_libuv=listener is None or Version(torch.__version__) >= Version(TAKES_LISTENER),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {own.rank} cannot reach rank 0 at {where} within {own.deadline:g} s: {error}"
        ) from error


def form_group_between_hosts(own: GroupRank) -> None:
    """Make the default group of ranks that know each other by torchrun's store only. Collective. Raises LaunchError."""
    store = _store_of_torchrun(own)
    cards = values_of_all(store, own, "card", card_id(own.device))
    _form_for_process(backend_for(cards) or HOST_BACKENDS[0], store, own)


def form_group_of_host(own: GroupRank, cards: Sequence[str]) -> None:
    """Make the default group of ranks of one host if they have a GPU each. Collective. Raises LaunchError.

    `cards`: each rank's `card_id`. The ranks connect over the loopback interface, unless the environment names another.
    """
    backend = backend_for(cards)
    if backend:
        os.environ.update(interface_between_ranks())
        _form_for_process(backend, _store_of_torchrun(own), own)


def backend_for(cards: Sequence[str]) -> str:
    """Return the backend for ranks that use these cards (`card_id`); empty if they have no GPU each, or it is one."""
    kinds = {kind_of_card(card) for card in cards}
    if len(kinds) > 1 or kinds == {""} or len(cards) == 1:
        return ""
    backend = default_backend(kinds.pop())
    if backend in HOST_BACKENDS:
        return ""
    if len(set(cards)) < len(cards):
        log.warning(
            "%d ranks share %d GPUs, which is slow: %s needs one for each rank", len(cards), len(set(cards)), backend
        )
        return ""
    return backend


def check_default_group(device: str, cards: Sequence[str]) -> None:
    """Raise LaunchError if the default group, which may be the script's own, cannot carry messages of these ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or not is_accelerator(device):
        return
    backend = group_backend(torch.device(device))
    shared = [rank for rank, card in enumerate(cards) if cards.count(card) > 1]
    if shared and backend not in HOST_BACKENDS:
        raise LaunchError(
            f"ranks {shared} share GPUs, but the default group of torch.distributed uses {backend}, which needs one "
            "for each: initialise it with 'gloo', or leave it to patchpar, or start one rank per GPU"
        )


def _store_of_torchrun(own: GroupRank) -> Store:
    """Return the store in which ranks find each other, with the deadline as the limit of a wait.

    Under a prefix that is new to all ranks: torchrun's store keeps what a group that has ended wrote there, such as the
    addresses of its ranks, and ranks of another one would connect to these.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # it is documented

    job = (own.rank, *(os.environ.get(name) for name in JOB))
    try:
        if job not in _STORES:
            _STORES[job] = _opened_store(own)
        store = _STORES[job]
        number = store.add(f"patchpar groups of rank {own.rank}", 1)  # all ranks have formed as many
    except (RuntimeError, ValueError, TimedOut) as error:
        raise LaunchError(
            f"rank {own.rank} cannot reach torchrun's store within {own.deadline:g} s: {_why_no_store(error)}"
        ) from error
    store.set_timeout(timedelta(seconds=own.deadline))
    return PrefixStore(f"patchpar group {number}", store)


def _opened_store(own: GroupRank) -> Store:
    """Return the store that the environment names. Raises TimedOut, and RuntimeError and ValueError of torch.

    In a thread, since torch waits without a limit for an answer of what has accepted its connection.
    """
    from torch.distributed import rendezvous  # type: ignore[attr-defined]  # it is documented

    def open_it() -> Store:
        found = rendezvous("env://", own.rank, own.world_size, timeout=timedelta(seconds=own.deadline))
        return next(found)[0]

    return time_limited(own.deadline + ANSWER_SECONDS, open_it, "patchpar-store")


def _why_no_store(error: Exception) -> str:
    """Return why the store that the environment names cannot be reached, as far as that can be told."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as unknown:
        if unknown.errno == socket.EAI_NONAME and host:
            return f"MASTER_ADDR={host} is no name of a machine that this one knows"
    if isinstance(error, TimedOut):
        return f"what listens at {host}:{port} does not answer: is it another program? {OTHER_PORT}"
    if "EADDRINUSE" in str(error):
        return f"another program has port {port}: {OTHER_PORT}"
    return str(error)


def _form_for_process(backend: str, store: Store, own: GroupRank) -> None:
    """Make the default group for the rest of this process: the next executor uses it too, unless the script ends it."""
    _import_module_that_holds_default_group()
    form_group(backend, store, own)
    atexit.register(_leave_default_group)


def _import_module_that_holds_default_group() -> None:
    """Import torch.distributed.nn.functional before the default group exists.

    Its functions keep the default group of import time as a default argument, and so its threads, which would crash the
    process at exit (see `GroupControl`). Diffusers imports it at some point.
    """
    importlib.import_module("torch.distributed.nn.functional")


def _leave_default_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
