"""Groups of NCCL in which a failure is an exception, and not the end of the process, as torch has it.

NCCL notices within moments that a rank on another host is gone, or has ended its communicators, as it does at its
deadline. A thread of torch looks for that ten times in a second, and acts on it before this rank comes to its own
deadline.

From torch 2.15 on "nccl" names another implementation of groups, with which no deadline, abort or graph has been tried
on GPUs. The one of before is there under a name of its own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

FAILURES_ARE_RAISED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else a thread of torch ends the process
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else the process waits in every exchange, for as long as torch does
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else the default group ends it 8 minutes after a failure on any rank
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else the thread sleeps for a minute, and who destroys the group waits
}
"""Settings of groups of NCCL whose failures are exceptions of the exchange that is late, or the next one."""

NCCL = "nccl"
FORMER = "nccl-legacy"  # to torch; unknown before 2.14


def name_in_torch(backend: str) -> str:
    """Return the name by which torch makes groups of a backend whose failures are exceptions here."""
    import torch.distributed as dist

    return FORMER if backend == NCCL and dist.is_backend_available(FORMER) else backend


@contextmanager
def failures_are_raised() -> Iterator[None]:
    """Context in which groups of NCCL are made whose failures do not end the process, see FAILURES_ARE_RAISED.

    torch reads these from the environment when it makes a group; torchrun sets the first for all.
    """
    before = {name: os.environ.get(name) for name in FAILURES_ARE_RAISED}
    os.environ.update(FAILURES_ARE_RAISED)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
