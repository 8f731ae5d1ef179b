"""Predict the time of a step of SDXL and FLUX on 1 to 8 GPUs, from counts and published rates. No GPU is used.

python -m benchmarks.gpu.predict --write docs/figures/gpu-predict.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.denoisers import DENOISERS, NAMES, SHORT
from benchmarks.gpu.quiet import quiet_process
from benchmarks.gpu.recorder import CallCounts, Work
from benchmarks.gpu.strategies import fake_rank
from benchmarks.page import publish
from patchpar.strategies import parse_strategy

WORLDS = (2, 4, 8)
STRATEGIES = ("exact", "fresh-edges", "displaced")
MEASURED, OWN_WORK = Path(__file__).parents[2] / "docs" / "figures" / "gpu.json", "A rank's own work"
MEASURED_SIZE, MEASURED_WORLD = 1024, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Published rates: dense half-precision FLOP/s with fp32 sums, bytes per second of memory and to other GPUs."""

    name: str
    flops: float
    memory: float
    link: float
    source: str


DEVICES = (
    Device(
        name="H100 SXM",
        flops=989e12,
        memory=3.35e12,
        link=450e9,
        source="[NVIDIA H100](https://www.nvidia.com/en-us/data-center/h100/), half of the FLOP/s with sparsity; "
        "NVLink has 900 GB/s for both directions",
    ),
    Device(
        name="A100 SXM 80 GB",
        flops=312e12,
        memory=2.039e12,
        link=300e9,
        source="[NVIDIA A100](https://www.nvidia.com/en-us/data-center/a100/); NVLink has 600 GB/s for both directions",
    ),
    Device(
        name="RTX 4090",
        flops=165e12,
        memory=1.008e12,
        link=32e9,
        source="[NVIDIA Ada architecture](https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-"
        "architecture.pdf), fp16 with fp32 sums; no NVLink, so PCIe 4.0 x16",
    ),
)


H200 = Device(
    name="H200 SXM",
    flops=989e12,
    memory=4.8e12,
    link=450e9,
    source="[NVIDIA H200](https://www.nvidia.com/en-us/data-center/h200/), half of the FLOP/s with sparsity",
)
"""On which one rank's own work has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is not published as one number. Times in seconds, shares of the published rates."""

    launch: float = 5e-6
    operation: float = 15e-6
    shortest_kernel: float = 2e-6
    message: float = 10e-6
    matmul_fraction: float = 0.6
    memory_fraction: float = 0.8
    link_fraction: float = 0.7

    def lines(self) -> Iterator[str]:
        """Yield them as a list."""
        yield f"- a launch takes {self.launch * 1e6:.0f} µs of the process, a message {self.operation * 1e6:.0f} µs"
        yield (
            f"- a kernel takes as long as its FLOPs at {self.matmul_fraction:.0%} of the published rate "
            "(FlashAttention-2 reaches 50 to 73 % on an A100, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691)), "
            f"or as its bytes at {self.memory_fraction:.0%} of the memory's, whichever is more, and "
            f"{self.shortest_kernel * 1e6:.0f} µs at least; every kernel reads its inputs and writes its outputs, and "
            "nothing stays in a cache"
        )
        yield (
            f"- a message takes {self.message * 1e6:.0f} µs, and its bytes at {self.link_fraction:.0%} of the link's "
            "rate; in an exact step the device waits for all of it, in a stale one only for exchanges that are fresh"
        )
        yield (
            "- process, device and link work at the same time: the step takes as long as the slowest of them, so that "
            "stale values cost time too where all bytes of a step (column `link`) take longer than its kernels"
        )


LEFT_OUT = """\
Left out: Python between the launches of the process; text encoders, VAE and scheduler; kernels that are fused by a \
compiler; clocks that fall under load; what waiting for the slowest rank costs; links that several pairs share, and \
cards without peer access, such as the RTX 4090, whose messages pass through the memory of the host; and whether the \
model fits (FLUX in bf16 has 24 GB of weights, as much as an RTX 4090 has)."""


ASSUMED = Assumptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of one step: of the process, of kernels, of messages that the device waits for, and of all bytes."""

    host: float
    kernels: float
    messages: float
    link: float

    @property
    def step(self) -> float:
        """Eager: the process enqueues each launch and message."""
        return max(self.host, self.replayed)

    @property
    def replayed(self) -> float:
        """The process enqueues one graph."""
        return max(self.kernels + self.messages, self.link)


def predicted(counts: CallCounts, device: Device, stale: Collection[str] = ()) -> Prediction:
    """Predict one step of one rank. `stale`: kinds of values for which the device does not wait in this step."""
    rate = device.link * ASSUMED.link_fraction
    fresh = sum(size for kind, size in counts.booked.items() if kind not in stale)
    waits = sum(number for label, number in counts.rounds.items() if not set(label.split("+")) <= set(stale))
    return Prediction(
        host=sum(counts.launches.values()) * ASSUMED.launch + sum(counts.operations.values()) * ASSUMED.operation,
        kernels=sum(kernel_time(work, device) * number for work, number in counts.work.items()),
        messages=waits * ASSUMED.message + fresh / rate,
        link=sum(counts.booked.values()) / rate,
    )


def stale_kinds(strategy: str) -> set[str]:
    """Return the kinds of values that arrive a step later, and the bucket in which small ones travel."""
    policy = parse_strategy(strategy).policy
    if not policy.remembers:
        return set()
    of_bands = {kind for kind, when in (("halo", policy.halo), ("moments", policy.moments)) if when != "fresh"}
    return {"kv", "bucket", *of_bands}


def kernel_time(work: Work, device: Device) -> float:
    """Return the seconds of one kernel."""
    computing = work.flops / (device.flops * ASSUMED.matmul_fraction)
    moving = work.num_bytes / (device.memory * ASSUMED.memory_fraction)
    return max(computing, moving, ASSUMED.shortest_kernel)


def model_lines(model: str, size: int, worlds: Sequence[int], *, short: bool) -> Iterator[str]:
    """Yield the tables of one model, one for each device."""
    plain, counts = counted(model, size, worlds, short=short)
    yield f"## {NAMES[model]}, {size} x {size}"
    for device in DEVICES:
        one = predicted(plain, device)
        yield ""
        yield f"{device.name}, milliseconds of a step:"
        yield ""
        yield "| GPUs | strategy | process | kernels | messages | link | step | speed-up | as graph | its speed-up |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        yield _row(1, "plain", one, one)
        for (world, strategy), found in counts.items():
            yield _row(world, f"`{strategy}`", predicted(found, device, stale_kinds(strategy)), one)
    if size == MEASURED_SIZE and MEASURED_WORLD in worlds and not short:
        yield from beside_measured(model, plain, counts)


def beside_measured(model: str, plain: CallCounts, counts: Mapping[tuple[int, str], CallCounts]) -> Iterator[str]:
    """Yield a table of predicted kernels of one rank of four, beside what its own work took on an H200 as a graph."""
    sections = {each["heading"]: each for each in json.loads(MEASURED.read_text())}
    rows = [row for table in sections[OWN_WORK]["tables"] for row in table if row["model"] == model]
    took = {row["strategy"]: float(row["ms"]) for row in rows if row["step"].endswith("graph")}
    predictions = {"plain": plain, **{f"`{strategy}`": counts[MEASURED_WORLD, strategy] for strategy in STRATEGIES}}
    yield ""
    yield f"Kernels of one rank of four, {H200.name} ({H200.source}), beside a step as a graph, [measured](gpu.md):"
    yield ""
    yield "| strategy | predicted kernels, ms | measured, ms | of predicted |"
    yield "|---|---|---|---|"
    for strategy, found in predictions.items():
        kernels = 1e3 * predicted(found, H200).kernels
        if strategy in took:
            yield f"| {strategy} | {kernels:.1f} | {took[strategy]:.1f} | {took[strategy] / kernels:.2f}x |"


def counted(
    model: str, size: int, worlds: Sequence[int], *, short: bool
) -> tuple[CallCounts, dict[tuple[int, str], CallCounts]]:
    """Count the plain step, and the last kind of step of each strategy by number of ranks."""
    counts: dict[tuple[int, str], CallCounts] = {}
    for world in worlds:
        with fake_rank(min(1, world - 1), world) as rank:
            denoiser = DENOISERS[model](size, layers=SHORT[model] if short else None)
            plain = rank.plain(denoiser)
            for strategy in STRATEGIES:
                counts[world, strategy] = list(rank.steps(denoiser, strategy).values())[-1]
    return plain, counts


def _row(gpus: int, strategy: str, found: Prediction, one: Prediction) -> str:
    times = (found.host, found.kernels, found.messages, found.link, found.step)
    cells = [f"{1e3 * each:.1f}" for each in times]
    cells += [f"{one.step / found.step:.2f}x", f"{1e3 * found.replayed:.1f}", f"{one.replayed / found.replayed:.2f}x"]
    return f"| {gpus} | {strategy} | " + " | ".join(cells) + " |"


INTRODUCTION = """\
# Prediction for GPUs

**A prediction, not a measurement.** No GPU was used: kernels, messages and launches of rank 1 [are \
counted](gpu-counts.md), and their times computed from published rates under the assumptions below. It says where a \
step's time should go, and what limits it; a measurement on GPUs replaces it."""


COMPARISON = """\
Plain steps of both models and the work of one rank of four [were measured on one H200](gpu.md), as graphs at the end \
of each model's tables: kernels of a fourth of SDXL's rows are so short that they take about twice what is assumed. \
From Python the process takes several times as long, since its own Python is left out here. Of several GPUs nothing \
has been measured.

For comparison, measured by others, eager, with all that a pipeline does beside its steps, which are therefore at most \
as long as said here. SDXL at 1024 x 1024 in bf16 on one A100: 3.31 s for 30 steps, 110 ms for a step \
([PyTorch](https://pytorch.org/blog/accelerating-generative-ai-3/)). FLUX.1 dev at 1024 x 1024 on one H100: 6.71 s for \
28 steps, 240 ms for a step, and 154 ms compiled; on four with Ulysses 151 ms, and 58 ms compiled \
([xDiT](https://github.com/xdit-project/xDiT/blob/main/docs/performance/flux.md))."""


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the page."""
    yield INTRODUCTION
    yield ""
    yield "Assumptions:"
    yield ""
    yield from ASSUMED.lines()
    yield ""
    yield LEFT_OUT
    yield ""
    yield "| GPU | TFLOP/s | memory, TB/s | link, GB/s | source |"
    yield "|---|---|---|---|---|"
    for each in DEVICES:
        rates = f"{each.flops / 1e12:.0f} | {each.memory / 1e12:.2f} | {each.link / 1e9:.0f}"
        yield f"| {each.name} | {rates} | {each.source} |"
    yield ""
    yield COMPARISON
    for model in options.models:
        yield ""
        yield from model_lines(model, options.size, options.worlds, short=options.short)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(DENOISERS), default=list(DENOISERS))
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of GPUs")
    parser.add_argument("--short", action="store_true", help="with few layers, for a quick look")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    quiet_process(threads=1)
    publish(lines(options), options.write)


if __name__ == "__main__":
    main()
