"""Facts about GPUs and other accelerators by device type, from torch: no other module names one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from patchpar.errors import LaunchError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS = ("cuda", "xpu", "npu", "mps")
"""Device types of accelerators in torch; "cuda" is also the name in builds for ROCm."""

CUDA = KINDS[0]
"""The type of NVIDIA's and AMD's GPUs, which have Triton's kernels and those of attention."""

MIG = " MIG "  # in the names of instances of a GPU
NCCL_HOST = "NCCL_HOSTID"
"""Names the host of a process for NCCL, which takes GPUs of two hosts for two, though they have one id."""
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
    return "nccl" if found.startswith("nccl") else found  # torch has it in several implementations


def kind_of(device: str) -> str:
    """Return the type of a torch device name, such as "cuda" of "cuda:1"."""
    return device.partition(":")[0]


def is_accelerator(device: str) -> bool:
    """Return whether a torch device name is that of an accelerator."""
    return kind_of(device) in KINDS


def device_module(kind: str) -> Any:
    """Return torch's module for a device type, such as torch.cuda for "cuda". Raises LaunchError if it has none."""
    import torch

    try:
        return torch.get_device_module(kind)
    except RuntimeError as error:
        raise LaunchError(f"this build of torch has no devices of type {kind!r}: {error}") from error


def device_count(kind: str) -> int:
    """Return the number of accelerators of this type that torch can use; 0 if this build has none of the type."""
    try:
        return int(device_module(kind).device_count())
    except LaunchError:
        return 0


def main_kind() -> str:
    """Return the type of this machine's accelerators that devices="auto" means; empty without one.

    "mps" has to be named: it is one device, part of the memory that the CPU uses, and lacks some dtypes.
    """
    return next((kind for kind in KINDS if kind != "mps" and device_count(kind)), "")


def select_device(device: str) -> None:
    """Make an accelerator this process's current one, where kernels that are told no device run. Nothing for a CPU."""
    if is_accelerator(device) and ":" in device and hasattr(device_module(kind_of(device)), "set_device"):
        device_module(kind_of(device)).set_device(device)


def current_device(device: str) -> AbstractContextManager[None]:
    """Return a context manager in which an accelerator is the current one of this thread. Nothing for a CPU."""
    manager = getattr(device_module(kind_of(device)), "device", None) if is_accelerator(device) else None
    return nullcontext() if manager is None else manager(device)


def current_streams(devices: Iterable[torch.device]) -> list[Any]:
    """Return this thread's current stream of each accelerator; none of a CPU, nor where torch knows no streams."""
    modules = [(device, device_module(device.type)) for device in devices if is_accelerator(str(device))]
    return [module.current_stream(device) for device, module in modules if hasattr(module, "current_stream")]


def in_stream(stream: Any) -> AbstractContextManager[None]:
    """Return a context manager in which a stream is the current one of its device in this thread."""
    manager: AbstractContextManager[None] = device_module(stream.device.type).stream(stream)
    return manager


def current_index(device: torch.device) -> int:
    """Return the index of an accelerator, of the current one where the device names none."""
    return int(device_module(device.type).current_device()) if device.index is None else device.index


def has_graphs(kind: str) -> bool:
    """Return whether work on devices of this type can be captured as a graph, with the messages between them.

    That is NCCL's in torch.cuda, for GPUs of NVIDIA and AMD.
    """
    return kind == CUDA


def timing_events(kind: str) -> Callable[[], Any]:
    """Return what makes events of an accelerator's streams that measure times."""
    return partial(device_module(kind).Event, enable_timing=True)


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices, AMD's too, and without a driver."""
    import torch

    if device.type != CUDA or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def card_id(device: str) -> str:
    """Return its type and an id of the card that this process sees as `device`; empty for a CPU.

    Two cards differ in it. Their names do not tell: of ranks that see one card each, every one has "cuda:0". Instances
    of one card (MIG) have an id each, but NCCL refuses two of them as one GPU, so that they are known by their bus.
    Where the environment names a host for NCCL (NCCL_HOSTID), a card is another one on each such host, as for NCCL.
    """
    if not is_accelerator(device):
        return ""
    from patchpar.launch.rendezvous import this_host  # sockets, for many programs that ask for no card

    properties = getattr(device_module(kind_of(device)), "get_device_properties", None)
    found = None if properties is None else properties(device)
    uuid = getattr(found, "uuid", None)
    if MIG in getattr(found, "name", "") and hasattr(found, "pci_bus_id"):
        uuid = ":".join(f"{getattr(found, name, 0):02x}" for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
        uuid += f" of {this_host()}"
    of_host = f" of {os.environ[NCCL_HOST]}" if NCCL_HOST in os.environ else ""
    return f"{kind_of(device)} {uuid or f'{device} of {this_host()}'}{of_host}"


def name_of(device: str) -> str:
    """Return what the maker calls an accelerator, such as "NVIDIA H100"; its type where torch does not know it.

    "CPU" for a CPU.
    """
    if not is_accelerator(device):
        return "CPU"
    name = getattr(device_module(kind_of(device)), "get_device_name", None)
    return kind_of(device) if name is None else str(name(device))


def kind_of_card(card: str) -> str:
    """Return the device type in a `card_id`; empty for a CPU's."""
    return card.partition(" ")[0]


def default_backend(kind: str) -> str:
    """Return the backend of torch.distributed for devices of this type, such as "nccl"; "gloo" if it has no other.

    A build of torch for GPUs may lack NCCL, as those for Windows do, and still name it.
    """
    import torch
    import torch.distributed as dist

    found = dist.Backend.default_device_backend_map.get(kind, HOST_BACKENDS[0])
    is_for_gpus = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    lacks_nccl = is_for_gpus and not dist.is_nccl_available()
    return HOST_BACKENDS[0] if kind == CUDA and lacks_nccl else found


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors may still take on an accelerator: free there, or reserved by torch and unused.

    None for the CPU, whose memory all ranks of a host share, and where torch does not know.
    """
    if not is_accelerator(str(device)):
        return None
    module = device_module(device.type)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


def untaken_fraction(device: torch.device) -> float:
    """Return the part of an accelerator's memory, 0 to 1, that no process has taken; 0 where torch does not know."""
    module = device_module(device.type)
    if not is_accelerator(str(device)) or not hasattr(module, "mem_get_info"):
        return 0.0
    free, total = module.mem_get_info(device)
    return float(free / total)


def release_cached(device: torch.device) -> None:
    """Give back the memory of freed tensors that torch keeps for new ones; also of those that only cycles refer to."""
    gc.collect()
    if is_accelerator(str(device)) and hasattr(device_module(device.type), "empty_cache"):
        device_module(device.type).empty_cache()


def pin_host_memory(x: Tensor, device: torch.device) -> bool:
    """Page-lock host memory [bytes] that this process has mapped, for copies to `device` that do not block.

    Return whether that was done, which is only where torch registers memory with the driver: of NVIDIA, and of AMD.
    """
    import torch

    if device.type != CUDA:
        return False
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(driver.cudaHostRegister(x.data_ptr(), x.numel(), 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps the error, which torch would raise, once, after its next launch
        torch.full((1,), 0.0, device=device)
    return False


def unpin_host_memory(address: int) -> None:
    """Undo `pin_host_memory`, before the memory is unmapped."""
    import torch

    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(address)


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of an accelerator's default generator, uint8 [N]; None for the CPU."""
    if not is_accelerator(str(device)):
        return None
    module = device_module(device.type)
    return module.get_rng_state() if device.index is None or not _has_several(module) else module.get_rng_state(device)


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of an accelerator's default generator, uint8 [N]."""
    module = device_module(device.type)
    if device.index is None or not _has_several(module):
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def used_device() -> torch.device | None:
    """Return the current accelerator of this process if it has used one. Does not begin to use one."""
    import torch

    for kind in KINDS:
        is_initialized = getattr(device_module(kind), "is_initialized", None) if device_count(kind) else None
        if is_initialized is not None and is_initialized():
            return torch.device(kind)
    return None


def _has_several(module: Any) -> bool:
    """Whether torch can have several devices of a type, so that functions take the device; of "mps" it has one."""
    return hasattr(module, "set_device")


def nccl_version() -> str | None:
    """Return the version of NCCL (of RCCL, in builds for ROCm) in this build of torch; None without it."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def random_width(device: str) -> int:
    """Return how many elements this GPU samples side by side; 0 for the CPU, and where torch does not say.

    torch's kernel gives each of so many threads a sequence of its own, at most one thread for each value (ATen's
    `calc_execution_policy`). So of tensors with more values, GPUs of another width sample other values from one seed.
    """
    module = device_module(kind_of(device)) if is_accelerator(device) else None
    properties = getattr(module, "get_device_properties", lambda _: None)(device)
    processors = getattr(properties, "multi_processor_count", 0)
    return int(processors * getattr(properties, "max_threads_per_multi_processor", 0))
