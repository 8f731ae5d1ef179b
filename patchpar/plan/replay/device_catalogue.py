"""Published facts about devices, as data: memory, rates, and ports to other devices. All from data sheets or reviews.

FLOP/s are dense, with sums in fp32; bytes per second of a port are those of one direction. Parts of a rate that
products reach are the most that others have measured over many shapes, where they have:
https://github.com/mag-/gpu_benchmark (A100, H100, MI300X, L40, L40S, RTX4090), and for the L20
https://github.com/DefTruth/CUDA-Learn-Notes (hgemm, 105 to 115 TFLOP/s). Rates of caches are those of copies of 16 MB
that https://github.com/smallscientist1/cuda_microbenchmark has measured (A100, H100, RTX 4090). The H200, H800 and H20
have that of the H100, whose die they are; L20, L40, L40S and RTX 5090 that of the RTX 4090 by processors; the B200 and
the MI300X as many times the memory's as the H100.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GB, MB = 10**9, 10**6
TERA = 10**12
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device as its maker describes it.

    `flops`: per second, for half precision and fp32. `memory_rate`: bytes per second of its own memory; `cache`: bytes
    of the last level before it, `cache_rate`: bytes per second that are read from it and written to it. `nvlink`: bytes
    per second in one direction to other devices of its host, over NVLink or the like; 0 without one. `pcie`: its
    generation. `peers`: whether it reaches the memory of others over PCIe, without the host's. `processors`: that
    compute a tile of a product each (SMs). `matmul_fraction`, `attention_fraction`: how much of the FLOP/s the largest
    matrix products and attention reach. `tf32`: the part of the rate in half precision that convolutions in fp32 have,
    which torch computes in TF32 unless told otherwise.
    """

    name: str
    processors: int
    memory: int
    memory_rate: float
    flops: Mapping[str, float]
    pcie: int
    source: str
    cache: int
    cache_rate: float
    nvlink: float = 0
    peers: bool = True
    matmul_fraction: float = 0.75
    attention_fraction: float = 0.6
    tf32: float = 0.5


LIMITED = 0.65
"""Of the FLOP/s, on devices whose power limits large products, where nobody is known to have measured them."""
OVER_A_NETWORK = 0.885
"""Of the best products of an A100: what compiled steps of a UNet reach by the figures of diffusers, see
benchmarks/forecast/batches.py."""
ADA = 0.8
NVIDIA = "https://www.nvidia.com/en-us/data-center"
LOCKWOOD = "https://glennklockwood.com/garden/processors"
DEVICES = (
    DeviceSpec(
        name="A100",
        processors=108,
        memory=80 * GB,
        memory_rate=2039 * GB,
        flops=dict.fromkeys(HALF, 312 * TERA) | {"float32": 19.5 * TERA},
        nvlink=300 * GB,
        pcie=4,
        matmul_fraction=OVER_A_NETWORK * 267.9 / 312,
        cache=40 * MB,
        cache_rate=2167 * GB,
        source=f"{NVIDIA}/a100/ (SXM, 80 GB); {LOCKWOOD}/A100",
    ),
    DeviceSpec(
        name="H100",
        processors=132,
        memory=80 * GB,
        memory_rate=3350 * GB,
        flops=dict.fromkeys(HALF, 989 * TERA) | {"float32": 66.9 * TERA},
        nvlink=450 * GB,
        pcie=5,
        matmul_fraction=792.1 / 989,
        cache=50 * MB,
        cache_rate=4199 * GB,
        source=f"{NVIDIA}/h100/ (SXM, 80 GB); {LOCKWOOD}/h100",
    ),
    DeviceSpec(
        name="H200",
        processors=132,
        memory=141 * GB,
        memory_rate=4800 * GB,
        flops=dict.fromkeys(HALF, 989 * TERA) | {"float32": 66.9 * TERA},
        nvlink=450 * GB,
        pcie=5,
        matmul_fraction=792.1 / 989,
        cache=50 * MB,
        cache_rate=4199 * GB,
        source=f"{NVIDIA}/h200/ (SXM); rates are those of the H100: {LOCKWOOD}/h100",
    ),
    DeviceSpec(
        name="H800",
        processors=132,
        memory=80 * GB,
        memory_rate=3350 * GB,
        flops=dict.fromkeys(HALF, 989 * TERA) | {"float32": 66.9 * TERA},
        nvlink=200 * GB,
        pcie=5,
        matmul_fraction=792.1 / 989,
        cache=50 * MB,
        cache_rate=4199 * GB,
        source="https://arxiv.org/abs/2505.09343 (an H100 whose NVLink has 400 GB/s in both directions together)",
    ),
    DeviceSpec(
        name="H20",
        processors=78,
        memory=96 * GB,
        memory_rate=4000 * GB,
        flops=dict.fromkeys(HALF, 148 * TERA) | {"float32": 44 * TERA},
        nvlink=450 * GB,
        pcie=5,
        cache=60 * MB,
        cache_rate=4199 * GB,
        source="https://zangshuxian.com/new/674733024499207168 (rates, memory); NVLink as the H100: "
        "https://www.taoguba.com.cn/Article/2551318/blog/Article/5364790/1",
    ),
    DeviceSpec(
        name="B200",
        processors=148,
        memory=180 * GB,
        memory_rate=8000 * GB,
        flops=dict.fromkeys(HALF, 2250 * TERA) | {"float32": 80 * TERA},
        nvlink=900 * GB,
        pcie=5,
        matmul_fraction=LIMITED,
        cache=96 * MB,
        cache_rate=10_000 * GB,
        source=f"{LOCKWOOD}/B200 (HGX, 1,000 W); memory: "
        "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview",
    ),
    DeviceSpec(
        name="MI300X",
        processors=304,
        memory=192 * GB,
        memory_rate=5300 * GB,
        flops=dict.fromkeys(HALF, 1307.4 * TERA) | {"float32": 163.4 * TERA},
        nvlink=448 * GB,
        pcie=5,
        tf32=0,
        matmul_fraction=758.3 / 1307.4,
        cache=256 * MB,
        cache_rate=6640 * GB,
        source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html; links between 8 devices: "
        "https://www.emergentmind.com/topics/amd-mi300x-gpu",
    ),
    DeviceSpec(
        name="L20",
        processors=92,
        memory=48 * GB,
        memory_rate=864 * GB,
        flops=dict.fromkeys(HALF, 119.5 * TERA) | {"float32": 59.35 * TERA},
        pcie=4,
        attention_fraction=ADA,
        matmul_fraction=110 / 119.5,
        cache=96 * MB,
        cache_rate=2620 * GB,
        source="https://technical.city/pl/video/L20; half precision: "
        "https://github.com/xdit-project/xDiT/blob/main/docs/performance/hunyuandit.md",
    ),
    DeviceSpec(
        name="L40",
        processors=142,
        memory=48 * GB,
        memory_rate=864 * GB,
        flops=dict.fromkeys(HALF, 181 * TERA) | {"float32": 90.5 * TERA},
        pcie=4,
        attention_fraction=ADA,
        matmul_fraction=170.3 / 181,
        cache=96 * MB,
        cache_rate=4044 * GB,
        source=f"{NVIDIA}/l40/; https://www.mullet.se/product.html?product_id=355414",
    ),
    DeviceSpec(
        name="L40S",
        processors=142,
        memory=48 * GB,
        memory_rate=864 * GB,
        flops=dict.fromkeys(HALF, 362 * TERA) | {"float32": 91.6 * TERA},
        pcie=4,
        attention_fraction=ADA,
        matmul_fraction=252 / 362,
        cache=48 * MB,
        cache_rate=4044 * GB,
        source=f"{NVIDIA}/l40s/; https://www.mullet.se/product.html?product_id=355414",
    ),
    DeviceSpec(
        name="RTX4090",
        processors=128,
        memory=24 * GB,
        memory_rate=1008 * GB,
        flops=dict.fromkeys(HALF, 165 * TERA) | {"float32": 82.6 * TERA},
        pcie=4,
        peers=False,
        attention_fraction=ADA,
        matmul_fraction=1.0,
        cache=72 * MB,
        cache_rate=3645 * GB,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf; "
        "https://waredb.com/processor/nvidia-geforce-rtx-4090",
    ),
    DeviceSpec(
        name="RTX5090",
        processors=170,
        memory=32 * GB,
        memory_rate=1792 * GB,
        flops=dict.fromkeys(HALF, 209.5 * TERA) | {"float32": 104.8 * TERA},
        pcie=5,
        peers=False,
        attention_fraction=ADA,
        cache=96 * MB,
        cache_rate=4841 * GB,
        source="https://www.spheron.network/blog/nvidia-rtx-5090-specs/ (memory, PCIe); rates with sums in fp32: "
        "https://main-horse.github.io/posts/5090-mm-perf",
    ),
)
"""Devices whose figures were looked up. Another one is an entry more. `nvlink` of the MI300X is Infinity Fabric."""
