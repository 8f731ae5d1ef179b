"""A rank that is twice as slow, with parts as measured: seconds of a step against those of the ideal split.

    python -m benchmarks.measured_ratio --write docs/figures/measured-ratio.md

A layer of the embedded model sleeps in proportion to the rows that its rank has, twice as long on one of two CPU
workers. Sleeping takes no processor time, so that other programs disturb little. Ideal are two thirds of the rows on
the fast rank: a step takes two thirds of what it takes on that rank alone. The image has 12 times the fewest rows of a
rank, which can be divided so.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.measured_ratio.sleeping import let_sleep
from benchmarks.page import publish
from patchpar import ParallelPipeline
from patchpar.models.files import embedded_model
from patchpar.models.loading import load_pipeline

SIZE, STEPS, SLOWNESS = 192, 9, 2.0
CALL = {"prompt": "a red house", "height": SIZE, "width": SIZE, "guidance_scale": 1.0, "output_type": "latent"}
PLANS = ("patch=2", "patch=2,ratio=2:1", "patch=2,ratio=measured")


def step_seconds(pipe: ParallelPipeline, ranks: tuple[int, ...], plan: str) -> tuple[float, str]:
    """Return the median seconds between the ends of a job's steps, after two of them, and its plan."""
    job = pipe.submit(
        **CALL, num_inference_steps=STEPS, plan=plan, ranks=ranks, generator=torch.Generator().manual_seed(0)
    )
    times: list[float] = []
    while not job.wait(0.002):
        while len(times) < job.progress.step:
            times.append(time.perf_counter())
    job.result()
    return median(after - before for before, after in pairwise(times[2:])), str(job.run.plan)


def page(seconds: float) -> Iterator[str]:
    """Yield the lines of the page."""
    with tempfile.TemporaryDirectory() as folder:
        slow = Path(folder) / "slow"
        slow.write_text("")
        plain = load_pipeline(str(embedded_model("embedded")), {"variant": "fp16", "torch_dtype": torch.float32})
        pipe = let_sleep(plain, seconds, SIZE, SLOWNESS, slow)
        with ParallelPipeline(pipe, devices="cpu:2", trusted_code=["benchmarks"]) as parallel:
            slow.write_text(str(parallel._executor.pids[1]))
            for plan in PLANS[:2]:
                step_seconds(parallel, (0, 1), plan)  # which verifies it
            alone, _ = step_seconds(parallel, (0,), "single")
            rows = [(plan, *step_seconds(parallel, (0, 1), plan)) for plan in PLANS]
    ideal = alone * SLOWNESS / (1 + SLOWNESS)
    yield "# A rank that is twice as slow"
    yield ""
    yield (
        f"One layer sleeps {seconds:g} s for a whole image, {SLOWNESS:g} times as long on the second of two CPU "
        f"workers. A step on the first one alone takes {alone:.3f} s, so that ideal parts take {ideal:.3f} s. "
        "`python -m benchmarks.measured_ratio`"
    )
    yield from ("", "| plan asked for | plan of the job | s / step | of ideal |", "|---|---|---|---|")
    for asked, found, used in rows:
        yield f"| `{asked}` | `{used}` | {found:.3f} | {found / ideal:.2f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="that the layer sleeps for a whole image")
    parser.add_argument("--write", type=Path, help="also write the page to this file")
    options = parser.parse_args()
    publish(page(options.seconds), options.write)


if __name__ == "__main__":
    main()
