"""Connect ranks that torchrun has started: through sockets of one host, or between hosts through torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from patchpar.launch.authentication import Greetings
from patchpar.launch.control_group import Control, GroupControl, LinkControl
from patchpar.launch.default_group import GroupRank, form_group_between_hosts
from patchpar.launch.links import PeerLink
from patchpar.launch.message_seal import MessageSeal, new_key
from patchpar.launch.rendezvous import linked, meet, name_of_job
from patchpar.launch.sealed_control import SealedControl
from patchpar.launch.shared_secret import NetworkTrust


class TorchrunConnection(NamedTuple):
    """What connects a rank with the others. `links`, `seal`: see RankContext."""

    control: Control
    links: Mapping[int, PeerLink] | None = None
    seal: MessageSeal | None = None


def connect_ranks(own: GroupRank, deadline: float, trust: NetworkTrust) -> TorchrunConnection:
    """Connect this rank with all others: through sockets of one host, or between hosts, where they authenticate.

    `deadline`: seconds. Collective. Raises LaunchError if they do not connect or do not know one another, and
    PlanError for a bad secret file.
    """
    import torch.distributed as dist

    job = name_of_job(own.world_size)
    if job is not None:
        trust.check()
        return _connect_on_host(job, own, deadline)
    if not dist.is_initialized():
        form_group_between_hosts(own)
    group = GroupControl()
    try:
        greetings = Greetings(group, trust, own.rank, deadline)
        greetings.check()
        if greetings.are_of_one_host:
            connection = _connect_on_host(f"patchpar-{greetings.digest.hex()[:32]}", own, deadline)
            group.leave()  # only now: all others have met, and so have read all of the greetings
            return connection
        seal = greetings.authenticate()
    except BaseException:
        group.leave()
        raise
    return TorchrunConnection(group if seal is None else SealedControl(group, seal), seal=seal)


def _connect_on_host(name: str, own: GroupRank, deadline: float) -> TorchrunConnection:
    """Connect ranks of one user on one host, where the kernel says who is at the other end.

    Only what goes through torch.distributed all the same, for GPUs, needs the seal.
    """
    sockets = meet(f"{name}-control", own.rank, own.world_size, deadline)
    links = linked(f"{name}-links", own.rank, own.world_size, deadline)
    control = LinkControl(own.rank, own.world_size, sockets)
    return TorchrunConnection(control, links, MessageSeal(control.broadcast(new_key()), own.rank))
