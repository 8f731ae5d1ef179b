"""Published facts about devices, as data: memory, rates, and ports to other devices. All from data sheets or reviews.

FLOP/s are dense, with sums in fp32; bytes per second of a port are those of one direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GB = 10**9
TERA = 10**12
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device as its maker describes it.

    `flops`: per second, for half precision and fp32. `memory_rate`: bytes per second of its own memory. `nvlink`: bytes
    per second in one direction to other devices of its host, over NVLink or the like; 0 without one. `pcie`: its
    generation. `peers`: whether it reaches the memory of others over PCIe, without the host's. `matmul_fraction`,
    `attention_fraction`: how much of the FLOP/s large matrix products and attention reach.
    """

    name: str
    memory: int
    memory_rate: float
    flops: Mapping[str, float]
    pcie: int
    source: str
    nvlink: float = 0
    peers: bool = True
    matmul_fraction: float = 0.75
    attention_fraction: float = 0.6


LIMITED = 0.55
"""Of the FLOP/s, on devices whose power and launches limit large products."""
ADA = 0.8
NVIDIA = "https://www.nvidia.com/en-us/data-center"
DEVICES = (
    DeviceSpec(
        name="A100",
        memory=80 * GB,
        memory_rate=2039 * GB,
        flops=dict.fromkeys(HALF, 312 * TERA) | {"float32": 19.5 * TERA},
        nvlink=300 * GB,
        pcie=4,
        source=f"{NVIDIA}/a100/ (SXM, 80 GB)",
    ),
    DeviceSpec(
        name="H100",
        memory=80 * GB,
        memory_rate=3350 * GB,
        flops=dict.fromkeys(HALF, 989 * TERA) | {"float32": 67 * TERA},
        nvlink=450 * GB,
        pcie=5,
        matmul_fraction=LIMITED,
        source=f"{NVIDIA}/h100/ (SXM, 80 GB)",
    ),
    DeviceSpec(
        name="H200",
        memory=141 * GB,
        memory_rate=4800 * GB,
        flops=dict.fromkeys(HALF, 989 * TERA) | {"float32": 67 * TERA},
        nvlink=450 * GB,
        pcie=5,
        matmul_fraction=LIMITED,
        source=f"{NVIDIA}/h200/ (SXM)",
    ),
    DeviceSpec(
        name="L40",
        memory=48 * GB,
        memory_rate=864 * GB,
        flops=dict.fromkeys(HALF, 181 * TERA) | {"float32": 90.5 * TERA},
        pcie=4,
        attention_fraction=ADA,
        source=f"{NVIDIA}/l40/",
    ),
    DeviceSpec(
        name="L40S",
        memory=48 * GB,
        memory_rate=864 * GB,
        flops=dict.fromkeys(HALF, 362 * TERA) | {"float32": 91.6 * TERA},
        pcie=4,
        attention_fraction=ADA,
        source=f"{NVIDIA}/l40s/",
    ),
    DeviceSpec(
        name="RTX4090",
        memory=24 * GB,
        memory_rate=1008 * GB,
        flops=dict.fromkeys(HALF, 165 * TERA) | {"float32": 82.6 * TERA},
        pcie=4,
        peers=False,
        attention_fraction=ADA,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
)
"""Devices whose figures were looked up. Another one is an entry more."""
