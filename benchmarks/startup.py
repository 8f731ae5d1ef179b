"""How long a user waits for the first step, and what a call costs beyond the pipeline's own.

    python -m benchmarks.startup --runs 5
    python -m benchmarks.startup --write docs/figures/startup.md

Start-up: from the start of a Python process to the end of the first denoising step, of plain diffusers in one process
and of a ParallelPipeline with two CPU workers, forked or each a new Python process, in turns. Overhead: one device, so
this process; the same pipeline called by itself and through ParallelPipeline, in turns. Medians, and the ratio of
medians: only what was measured in turns can be compared. Also the processor time that all kinds of start take, which a
busy machine does not change much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.page import write_page

STARTUP_LIMIT, OVERHEAD_LIMIT = 1.30, 0.05
REPORT = """
def tell(moment):
    '''Write the moment, and the processor time of this process and of all that it has started and ended.'''
    time.sleep(0.5)  # for the template process to reap its workers
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    fields = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11:15] for pid in children]
    ticks = sum(int(field) for each in fields for field in each)
    os.write(1, f"{moment} {sum(os.times()[:4]) + ticks / os.sysconf('SC_CLK_TCK')}".encode())
    os._exit(0)
"""
START_METHODS = ("forkserver", "spawn")
CALL = {"num_inference_steps": 2, "height": 128, "width": 128}
PLAIN = """
import os, sys, time
import torch
from diffusers import StableDiffusionXLPipeline
pipe = StableDiffusionXLPipeline.from_pretrained(sys.argv[1], variant="fp16", torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
def first(pipe, step, timestep, tensors):
    tell(time.monotonic())
pipe("a red house", num_inference_steps=2, height=128, width=128, callback_on_step_end=first)
"""
PARALLEL = """
import os, sys, time
from patchpar import ParallelPipeline
options = {"variant": "fp16", "torch_dtype": "float32", "devices": "cpu:2", "start_method": sys.argv[2]}
pipe = ParallelPipeline.from_pretrained(sys.argv[1], **options)
def first(step, total):
    moment = time.monotonic()
    pipe.close()
    tell(moment)
pipe.on_step = first
pipe("a red house", num_inference_steps=2, height=128, width=128)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="starts of each kind")
    parser.add_argument("--calls", type=int, default=30, help="calls of each kind")
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "assets" / "scenes-unet")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    found = {"startup": startup(options.model, options.runs), "call": call_overhead(options.model, options.calls)}
    text = tables(found, options.runs, options.calls)
    print(json.dumps(found) if options.json else text)
    if options.write:
        write_page(text + "\n", options.write)


def tables(found: dict[str, dict[str, float]], runs: int, calls: int) -> str:
    """What was measured, as a page."""
    start, call = found["startup"], found["call"]
    lines = [
        "# Time to the first step",
        "",
        f"From the start of a Python process to the end of the first denoising step of the embedded model, medians of "
        f"{runs} starts of each kind in turns:",
        "",
        "| | plain diffusers, one process | two CPU workers | ratio | limit | two new Python processes |",
        "|---|---|---|---|---|---|",
        f"| first step, s | {start['plain_s']:.2f} | {start['forkserver_s']:.2f} | {start['ratio']:.2f} | "
        f"{STARTUP_LIMIT:.2f} | {start['spawn_s']:.2f} |",
        f"| processor time, s | {start['plain_cpu_s']:.2f} | {start['forkserver_cpu_s']:.2f} | "
        f"{start['forkserver_cpu_s'] / start['plain_cpu_s']:.2f} | | {start['spawn_cpu_s']:.2f} |",
        "",
        f"A call of {CALL['num_inference_steps']} steps at {CALL['height']} x {CALL['width']} pixels on one device, "
        f"medians of {calls} in turns:",
        "",
        "| plain, ms | through ParallelPipeline, ms | overhead | limit |",
        "|---|---|---|---|",
        f"| {call['plain_s'] * 1e3:.1f} | {call['inline_s'] * 1e3:.1f} | {call['overhead']:+.1%} | "
        f"{OVERHEAD_LIMIT:.0%} |",
    ]
    return "\n".join(lines)


def startup(model: Path, runs: int) -> dict[str, float]:
    """Seconds to the first step, and of processor time, by kind of start."""
    kinds = ("plain", *START_METHODS)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for run in range(-1, runs):  # the first only warms the file cache
        for kind in kinds:
            figures = _to_first_step(kind, model)
            if run >= 0:
                found[kind].append(figures)
    seconds = {f"{kind}_s": statistics.median(wall for wall, _ in figures) for kind, figures in found.items()}
    processor = {f"{kind}_cpu_s": statistics.median(cpu for _, cpu in figures) for kind, figures in found.items()}
    return {**seconds, **processor, "ratio": seconds["forkserver_s"] / seconds["plain_s"]}


def _to_first_step(kind: str, model: Path) -> tuple[float, float]:
    """Wall and processor seconds from the start of a process to its first step. `kind`: "plain" or a start method."""
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", REPORT + (PLAIN if kind == "plain" else PARALLEL), str(model), kind],
        capture_output=True,
        env=environment,
        check=True,
        timeout=300,
    )
    moment, processor = map(float, done.stdout.split())
    return moment - start, processor


def call_overhead(model: Path, calls: int) -> dict[str, float]:
    """Median seconds of a call on one device, plain and through ParallelPipeline."""
    import torch
    from diffusers import StableDiffusionXLPipeline

    from patchpar import ParallelPipeline

    torch.set_num_threads(1)
    plain = StableDiffusionXLPipeline.from_pretrained(model, variant="fp16", torch_dtype=torch.float32)
    plain.set_progress_bar_config(disable=True)
    inline = ParallelPipeline(plain, devices=1)
    seconds: dict[str, list[float]] = {"plain": [], "inline": []}
    for call in range(-2, calls):
        for name, pipe in (("plain", plain), ("inline", inline))[:: 1 if call % 2 else -1]:
            taken = _seconds_of(pipe)
            if call >= 0:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["plain"], seconds["inline"], strict=True)]
    return {
        "plain_s": medians["plain"],
        "inline_s": medians["inline"],
        "overhead": statistics.median(ratios) - 1,
    }


def _seconds_of(pipe: Callable[..., Any]) -> float:
    start = time.perf_counter()
    pipe("a red house", output_type="latent", **CALL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
