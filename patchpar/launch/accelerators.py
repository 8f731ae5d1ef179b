"""Facts about GPUs and other accelerators by device type, from torch: no other module names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchpar.errors import LaunchError

if TYPE_CHECKING:
    import torch

HOST_BACKENDS = ("gloo", "mpi")
"""Backends whose waits block the process; those of accelerators work in the device's streams."""


def group_backend(device: torch.device) -> str:
    """Return the backend with which the default group carries tensors of `device`, such as "nccl".

    "gloo" also where the group has gloo for the CPU only, so that tensors have to be copied there.
    `dist.get_backend()` does not know: it says "undefined" of a group with a backend for each type of device, as
    `init_process_group()` makes it.

    Raises LaunchError if the group can carry neither tensors of `device` nor of the CPU.
    """
    import torch.distributed as dist

    config = dist.get_backend_config()
    backends = dict(pair.split(":", 1) for pair in config.split(","))
    found = backends.get(device.type) or backends.get("cpu")
    if found is None:
        raise LaunchError(
            f"the default group of torch.distributed ({config}) cannot carry tensors of {device}: initialise it with "
            "init_process_group() without a backend, or with 'cpu:gloo' in it"
        )
    return found
