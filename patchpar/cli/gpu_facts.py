"""What `patchpar doctor` says of GPUs: each card, the software for them, and what patchpar will use."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from patchpar.plan.byte_sizes import readable_bytes

SMI = "nvidia-smi"
SECONDS = 30.0
SHARED_MEMORY = Path("/dev/shm")  # where NCCL exchanges between GPUs that do not reach each other's memory
LEAST_SHARED = 2**29  # bytes of it that are enough for NCCL; a container has 2**26 unless told otherwise


def graphics_cards() -> list[dict[str, Any]]:
    """Return of each accelerator its name, memory in bytes, compute capability, and the others that it can address.

    What torch does not know of a type of device is None. `error`: why torch cannot use the device, of which it then
    knows nothing, such as a driver that is older than its CUDA.
    """
    from patchpar.launch.accelerators import KINDS, device_count

    return [_card(kind, index) for kind in KINDS for index in range(device_count(kind))]


def _card(kind: str, index: int) -> dict[str, Any]:
    try:
        return {**_facts(kind, index), "error": None}
    except RuntimeError as error:  # the driver's list of devices is longer than that of CUDA
        unknown = dict.fromkeys(("name", "free_bytes", "total_bytes", "capability", "peers"))
        return {"device": f"{kind}:{index}", **unknown, "error": " ".join(str(error).split())}


def _facts(kind: str, index: int) -> dict[str, Any]:
    from patchpar.launch.accelerators import device_count, device_module, name_of

    module = device_module(kind)
    free, total = module.mem_get_info(index) if hasattr(module, "mem_get_info") else (None, None)
    reaches = getattr(module, "can_device_access_peer", None)
    others = [other for other in range(device_count(kind)) if other != index]
    capability = getattr(module, "get_device_capability", lambda _: None)(index)
    return {
        "device": f"{kind}:{index}",
        "name": name_of(f"{kind}:{index}"),
        "free_bytes": free,
        "total_bytes": total,
        "capability": ".".join(map(str, capability)) if isinstance(capability, tuple) else None,
        "peers": None if reaches is None else [f"{kind}:{other}" for other in others if reaches(index, other)],
    }


def gpu_software() -> dict[str, str | None]:
    """Return versions of the driver, of CUDA or ROCm, of NCCL and of Triton; None for what is not there."""
    import torch

    from patchpar.launch.accelerators import nccl_version

    return {
        "driver": _driver(),
        "toolkit": torch.version.cuda or torch.version.hip,
        "nccl": nccl_version(),
        "triton": _triton(),
    }


def links() -> str | None:
    """Return the output of `nvidia-smi topo -m`, the links between GPUs; None without nvidia-smi."""
    return _answer("topo", "-m")


def will_use(devices: Sequence[str], software: dict[str, str | None]) -> str:
    """Return what ranks on these devices exchange through, with which kernels, and how these are launched."""
    from patchpar.launch.accelerators import default_backend, has_graphs, is_accelerator, kind_of
    from patchpar.launch.handshake import needs_group

    if not is_accelerator(devices[0]):
        return "shared memory between CPU workers, torch's kernels"
    kernels = "patchpar's fused kernels (Triton)" if software["triton"] else "torch's kernels, since Triton is missing"
    if has_graphs(kind_of(devices[0])):
        kernels += (
            ", launched one by one: with --graphs (graphs='auto') a step is one launch, which fast GPUs need"
            if len(devices) == 1
            else ", a step in one launch as a CUDA graph where plan and model allow it"
        )
    if len(devices) == 1:
        return f"{kernels}; one device, so that nothing is exchanged"
    between = default_backend(kind_of(devices[0])) if needs_group(tuple(devices)) else "memory of the host"
    return f"{kernels}; exchange through {between}"


def lacks(devices: Sequence[str], cards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is missing here for ranks on these devices, or slows them down, and what helps.

    `cards`: see `graphics_cards`.
    """
    from patchpar.launch.handshake import needs_group

    used = [card for card in cards if card["device"] in devices and card["name"] is not None]
    found = list(_without_kernels(used))
    if needs_group(tuple(devices)):
        found += [*_without_peers(used), *_without_shared_memory()]
    if len({card["name"] for card in used}) > 1:
        found.append("the GPUs are not alike: give the faster ones more work, with ratio=... of the plan")
    return found


def _without_kernels(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from patchpar.comm.kernels.triton_check import has_triton, why_no_kernels
    from patchpar.launch.accelerators import CUDA

    numbers = [card["device"].partition(":")[2] for card in cards if card["device"].startswith(CUDA)]
    for number in numbers if has_triton() else ():
        reason = why_no_kernels(int(number))
        if reason:
            yield f"no fused kernels on {CUDA}:{number}: {reason}"


def _without_peers(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = [card["device"] for card in cards]
    apart = [
        f"{card['device']} and {other}"
        for number, card in enumerate(cards)
        for other in names[number + 1 :]
        if card["peers"] is not None and other not in card["peers"]
    ]
    if apart:
        yield (
            f"{', '.join(apart)} do not reach each other's memory, so that messages pass through that of the host: "
            "prefer plans that send little, such as cfg=2 or strategy=pcpp"
        )


def _without_shared_memory() -> Iterator[str]:
    try:
        size = shutil.disk_usage(SHARED_MEMORY).total
    except OSError:  # not on this system
        return
    if size < LEAST_SHARED:
        yield (
            f"{SHARED_MEMORY} has {readable_bytes(size)}, which is too little where NCCL exchanges there: start the "
            "container with --ipc=host or --shm-size=1g"
        )


def _triton() -> str | None:
    """Return Triton's version; None if it is missing or cannot be imported."""
    if find_spec("triton") is None:
        return None
    try:
        import triton
    except (ImportError, OSError):
        return None
    return str(triton.__version__)


def _driver() -> str | None:
    found = _answer("--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _answer(*arguments: str) -> str | None:
    """Return what nvidia-smi prints; None without it, or if it fails or does not answer."""
    if shutil.which(SMI) is None:
        return None
    try:
        answer = subprocess.run([SMI, *arguments], capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
