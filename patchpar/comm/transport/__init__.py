"""Transports carry the bytes of exchanges between ranks. The layers above do not know which transport they use.

    shared_memory    ranks of one host: one copy into shared memory, a notification through a socket, one copy out;
                     tensors that lie in shared memory for good are not copied into it
    threads          ranks that are threads of one process: tensors are copied to the receiver's device
    torch_p2p        NCCL between GPUs, gloo between hosts: torch.distributed point-to-point messages
    link_transport   from device to device between ranks with a GPU each, in groups that can be made anew; all else that
                     they send goes through shared memory
    probe            a check that sends one message from each rank to each
    delayed          one of the first two with added latency and limited bandwidth, for measurements

Messages between two ranks arrive in the order they were sent. Every rank runs the same exchanges in the same order,
so messages need no tags.
"""

from patchpar.comm.transport.connect import (
    alone,
    connect,
    connect_group,
    extend,
    form_groups,
    register_memory,
    shares_memory,
    transport_of_host,
    unregister_memory,
    watched,
)
from patchpar.comm.transport.delayed import DelayedTransport
from patchpar.comm.transport.link_transport import LinkTransport
from patchpar.comm.transport.message import (
    Arrived,
    Collectives,
    FlatParts,
    Incoming,
    Messages,
    Outgoing,
    Stall,
    TensorSpec,
    Transport,
    Work,
)
from patchpar.comm.transport.threads import Mailboxes, ThreadTransport

__all__ = [
    "Arrived",
    "Collectives",
    "DelayedTransport",
    "FlatParts",
    "Incoming",
    "LinkTransport",
    "Mailboxes",
    "Messages",
    "Outgoing",
    "Stall",
    "TensorSpec",
    "ThreadTransport",
    "Transport",
    "Work",
    "alone",
    "connect",
    "connect_group",
    "extend",
    "form_groups",
    "register_memory",
    "shares_memory",
    "transport_of_host",
    "unregister_memory",
    "watched",
]
