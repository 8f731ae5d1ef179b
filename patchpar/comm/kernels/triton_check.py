"""Whether Triton's kernels run on a GPU here: it builds a launcher when it first runs, which takes more than a GPU."""

import logging
from functools import cache
from importlib.util import find_spec

import torch

from patchpar.comm.kernels.program import LEAST_TRITON, Program, triton_version
from patchpar.launch.accelerators import CUDA, cuda_capability, current_device, device_count

LEAST_CAPABILITY, OF_BFLOAT16 = (7, 0), (8, 0)
"""Compute capabilities of NVIDIA's GPUs for which Triton compiles, and for which all of its versions compile bf16."""

NEEDS = "It needs a C compiler, Python's headers, and a folder that it can write (TRITON_CACHE_DIR)"
BLOCK = 16  # numbers that the kernel which is tried writes
_WRITE_ONES = Program("patchpar.comm.kernels.programs.write_ones", "write_ones_program")
log = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Whether Triton is installed. It comes with every build of torch for GPUs of NVIDIA and AMD under Linux."""
    return find_spec("triton") is not None


@cache
def runs_kernels(index: int, dtype: torch.dtype) -> bool:
    """Whether kernels for numbers of `dtype` run on the GPU `index` of this process.

    Not in fp64, since they add in fp32. Of a GPU that torch does not have, such as a negative index, of which only the
    launches are counted, they do.
    """
    if dtype == torch.float64 or not has_triton():
        return False
    if not 0 <= index < device_count(CUDA):
        return True
    capability = cuda_capability(torch.device(CUDA, index))
    if dtype == torch.bfloat16 and capability is not None and capability < OF_BFLOAT16:
        return False
    return _runs(index)


@cache
def _runs(index: int) -> bool:
    """Whether a kernel runs on a GPU. Once, a warning says where none does."""
    reason = why_no_kernels(index)
    if reason:
        log.warning("operators of torch take the place of fused kernels on GPU %d, and take longer: %s", index, reason)
    return not reason


def why_no_kernels(index: int) -> str:
    """Return why Triton's kernels do not run on the GPU `index` of this process; empty if one has been launched."""
    if not has_triton():
        return "Triton is not installed"
    found = triton_version()
    if found is not None and found < LEAST_TRITON:
        return (
            f"Triton {found[0]}.{found[1]} is installed, whose programs take no tuples: use {LEAST_TRITON[0]}."
            f"{LEAST_TRITON[1]} or newer, which comes with torch 2.7 and newer"
        )
    device = torch.device(CUDA, index)
    capability = cuda_capability(device)
    if capability is not None and capability < LEAST_CAPABILITY:
        return f"Triton compiles for compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} and newer"
    try:
        with current_device(str(device)):
            _WRITE_ONES.launch((1,), (torch.empty(BLOCK, device=device),), BLOCK=BLOCK)
    except Exception as error:  # noqa: BLE001  of a compiler, a linker, the driver, or of what is missing
        text = " ".join(str(error).split())
        return f"Triton cannot run a kernel. {NEEDS}: {text[:300]}"
    return ""
