"""The rate of a stream's stages against the law FPS = F / max(c, v), TTFF = S c + v, without GPUs: stages that sleep.

    python -m benchmarks.stream --write docs/figures/stream.md

A sleeping stage needs no core, so that a machine of two cores shows what the pipeline itself costs: messages, headers,
start-up of a block. Ranks are processes, blocks travel by the same transport as in a real stream.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.page import publish
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.launch.local import LocalExecutor
from patchpar.plan.stream_plan import StreamPlan
from patchpar.plan.stream_simulation import StreamCosts, law, simulate
from patchpar.stream.causal.stage_loop import StageLoop
from patchpar.stream.events import Change, Reference
from patchpar.stream.messages import BeginBlock, EndStream, StreamRun
from patchpar.stream.stage import FinishedBlock, Order, StageIO
from patchpar.stream.stage_link import Payload

LATENTS = (1, 16, 3, 90, 50)
"""One block of Live Avatar at 720 x 400 (arXiv:2512.04677)."""
FRAMES = 12
RUN = StreamRun(ranks=1, seed=0, rows=90, columns=50, first_block=0, adapt_sink=True)
IMAGE_STEPS = 4
IMAGE_RANKS = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeper:
    """A WanStream that only takes time: `costs.step` per denoising step, `costs.decode` per block."""

    steps: int
    costs: StreamCosts
    adapts_sink: bool = True
    inner: int = 1

    def payload(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(LATENTS, torch.bfloat16),)

    def new_state(self, step: int) -> int:
        return step

    def begin(self, block: int, inputs: Payload) -> Payload:
        return (torch.zeros(LATENTS, dtype=torch.bfloat16),)

    def apply(self, state: int, change: Change) -> None:
        pass

    def conditions(self, state: int) -> None:
        return None

    def step(self, state: int, block: int, payload: Payload) -> Payload:
        time.sleep(self.costs.step)
        return payload

    def adaptive_sink(self, payload: Payload) -> Change:
        return Reference(latents=payload[0][:, :, :1])

    def new_decoder(self) -> None:
        return None

    def decode(self, decoder: None, payload: Payload) -> Tensor:
        time.sleep(self.costs.decode)
        return torch.zeros(FRAMES, 1, 1, 3, dtype=torch.uint8)


def on_rank(this: Any, plan: StreamPlan, costs: StreamCosts, blocks: int) -> tuple[float, list[float]]:
    """When this rank began, and when blocks came out, by time.time."""
    out: list[float] = []

    def order(block: int, patience: float) -> Order:
        return BeginBlock(inputs=(), updates=()) if block < blocks else EndStream()

    def put(finished: FinishedBlock) -> None:
        out.append(time.time())

    around = StageIO(order=order, put=put, is_cancelled=lambda: False)
    loop = StageLoop(Sleeper(steps=plan.steps, costs=costs), plan, this.rank, Communicator(this.transport), around, RUN)
    start = time.time()
    loop.run()
    return start, out


def images_on_rank(this: Any, count: int, seconds: float) -> list[float]:
    """When images came out of a small img2img pipeline whose denoiser sleeps, by time.time."""
    from tests.tiny import image_pipelines  # with diffusers, which sleeping stages can do without

    pipe, arguments = image_pipelines.sd_img2img()
    pipe.set_progress_bar_config(disable=True)
    pipe.unet.conv_in.register_forward_pre_hook(lambda *_: time.sleep(seconds))  # only where it is computed
    arguments |= {"num_inference_steps": IMAGE_STEPS, "strength": 1.0, "output_type": "latent"}
    out: list[float] = []
    for _ in range(this.rank, count, this.world):
        pipe(**arguments)
        out.append(time.time())
    return out


def image_rows(pool: LocalExecutor, seconds: float, count: int) -> list[str]:
    """Images per second by number of ranks."""
    rates: list[tuple[int, float]] = []
    for ranks in IMAGE_RANKS:
        found = pool.call("run", "benchmarks.stream.__main__:images_on_rank", ranks, "auto", (count, seconds))
        out = sorted(moment for times in found[:ranks] for moment in times)[ranks:]  # the stages have filled
        rates.append((ranks, (len(out) - 1) / (out[-1] - out[0])))
    return [f"| {ranks} | {rate:.2f} | {rate / rates[0][1]:.2f} |" for ranks, rate in rates]


def row(pool: LocalExecutor, plan: StreamPlan, costs: StreamCosts, blocks: int) -> str:
    """One line of the table."""
    found = pool.call("run", "benchmarks.stream.__main__:on_rank", plan.ranks, "auto", (plan, costs, blocks))[
        : plan.ranks
    ]
    out = found[-1][1]
    warm = plan.depth + 1
    gaps = sorted(b - a for a, b in pairwise(out[warm:]))
    fps, first = FRAMES * len(gaps) / (out[-1] - out[warm]), out[0] - found[0][0]
    ideal, soonest = law(plan, costs)
    forecast = simulate(plan, costs)
    return (
        f"| {plan} | {ideal:.1f} | {forecast.fps:.1f} | {fps:.1f} | {fps / ideal:.1%} | {soonest:.2f} | {first:.2f} | "
        f"{1000 * gaps[int(0.99 * len(gaps))]:.0f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    parser.add_argument("--step", type=float, default=0.2, help="seconds per denoising step (default: 0.2)")
    parser.add_argument("--decode", type=float, default=0.15, help="seconds per block to decode (default: 0.15)")
    parser.add_argument("--blocks", type=int, default=40, help="blocks per stream (default: 40)")
    parser.add_argument("--image", type=float, default=1.5, help="seconds per denoiser call of an image (1.5)")
    parser.add_argument("--images", type=int, default=9, help="images per stream (default: 9)")
    options = parser.parse_args(arguments)
    turn = max(IMAGE_RANKS)
    if options.images <= turn or options.images % turn != 1:
        parser.error(f"--images {options.images}: ranks end their images together: one more than a multiple of {turn}")
    costs = StreamCosts(step=options.step, decode=options.decode, frames=FRAMES)
    plans = [StreamPlan.even(steps, steps + 1) for steps in (2, 3, 4)] + [StreamPlan.even(4, 2), StreamPlan.even(4, 3)]
    lines = [
        "# The stages of a stream against the law",
        "",
        f"Stages that sleep: c = {options.step:g} s per step, v = {options.decode:g} s to decode, {FRAMES} frames per "
        f"block, blocks of {LATENTS} in bf16, {options.blocks} blocks per stream.",
        "",
        "FPS = F / max(c, v) and TTFF = S c + v, a stage of several steps takes several c. By benchmarks/stream.",
        "",
        "| plan | law, fps | simulated | measured | of the law | first frame, law, s | measured, s | gap p99, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with LocalExecutor(["cpu"] * 5, "tests.ranks:Ranks", deadline=120.0) as pool:
        lines += [row(pool, plan, costs, options.blocks) for plan in plans]
        lines += ["", f"Images of {IMAGE_STEPS} steps, whose denoiser sleeps {options.image:g} s per call:", ""]
        lines += ["| ranks | images/s | against one |", "|---|---|---|"]
        lines += image_rows(pool, options.image, options.images)
    publish(lines, options.write)


if __name__ == "__main__":
    main()
