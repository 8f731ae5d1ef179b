"""A process group of torch.distributed that sends nothing and reports itself as NCCL's.

All of torch's own Python runs, as it does on GPUs: the checks, the handles, the groups. Each message is an operator of
the namespace `c10d`, which `recorder` sees. As with NCCL the messages of one `batch_isend_irecv` are one group with one
handle, whose `wait()` makes the stream wait; with a timeout it blocks the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@dataclass(slots=True)
class GroupCounts:
    """Batches of messages, waits that block the process, and questions whether a message has ended."""

    groups: int = 0
    polled: int = 0
    waits: int = 0


@contextmanager
def fake_nccl(rank: int, world: int, counts: GroupCounts) -> Iterator[None]:
    """Make this process rank `rank` of `world` in a default group that it leaves at the end."""
    if dist.is_initialized():
        raise RuntimeError("torch.distributed has a default group already: the stand-in for NCCL needs its own")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with ExitStack() as stack:
            for owner, name, found in _stand_ins(counts):
                stack.enter_context(mock.patch.object(owner, name, found))
            yield
    finally:
        dist.destroy_process_group()


def _stand_ins(counts: GroupCounts) -> Sequence[tuple[Any, str, Callable[..., Any]]]:
    batched = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        counts.groups += 1
        return batched(operations)[-1:]

    def wait(_: Any, timeout: Any = None) -> bool:
        counts.waits += timeout is not None
        return True

    def is_completed(_: Any) -> bool:
        counts.polled += 1
        return True

    def barrier(*_: Any, **__: Any) -> Any:
        counts.waits += 1
        return mock.Mock()

    return (
        (dist, "batch_isend_irecv", batch_isend_irecv),
        (dist, "barrier", barrier),
        (dist.Work, "wait", wait),
        (dist.Work, "is_completed", is_completed),
    )
