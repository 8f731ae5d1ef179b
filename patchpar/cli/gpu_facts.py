"""What `patchpar doctor` says of GPUs: each card, the software for them, and what patchpar will use."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

SMI = "nvidia-smi"
SECONDS = 30.0


def graphics_cards() -> list[dict[str, Any]]:
    """Return of each accelerator its name, memory in bytes, compute capability, and the others that it can address.

    What torch does not know of a type of device is None.
    """
    from patchpar.launch.accelerators import KINDS, device_count

    return [_card(kind, index) for kind in KINDS for index in range(device_count(kind))]


def _card(kind: str, index: int) -> dict[str, Any]:
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
    """Return what ranks on these devices exchange through, and with which kernels."""
    from patchpar.launch.accelerators import default_backend, is_accelerator, kind_of
    from patchpar.launch.handshake import needs_group

    if not is_accelerator(devices[0]):
        return "shared memory between CPU workers, torch's kernels"
    kernels = "patchpar's fused kernels (Triton)" if software["triton"] else "torch's kernels, since Triton is missing"
    if len(devices) == 1:
        return f"{kernels}; one device, so that nothing is exchanged"
    between = default_backend(kind_of(devices[0])) if needs_group(tuple(devices)) else "memory of the host"
    return f"{kernels}; exchange through {between}"


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
