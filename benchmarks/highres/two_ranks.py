"""A whole large picture on one rank and on two, from the prompt to the PNG, in turns: measured, not predicted."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.highres.counting import subjects
from benchmarks.highres.drawing import DEADLINE, GUIDANCE, NATIVE
from patchpar import ParallelPipeline, Plan, StructureGuidance
from patchpar.cli.png import write_png

WORLD, TURNS = 2, 3


def rows(strategies: dict[str, StructureGuidance], *, scale: int, steps: int) -> Iterator[str]:
    """Medians of seconds, by strategy. Two cores are kept to, so that every worker has one thread."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORLD])
    yield f"| {scale} x {scale}, {steps} steps | 1 rank | 2 ranks | faster | of that the PNG |"
    yield "|---|---|---|---|---|"
    with ParallelPipeline.from_pretrained(
        "embedded", devices=f"cpu:{WORLD}", plan=Plan(), deadline=DEADLINE, torch_dtype=torch.float32
    ) as pipe:
        pipe.set_progress_bar_config(disable=True)
        for name, strategy in strategies.items():
            plans = {ranks: Plan(patch=ranks, strategy=strategy) for ranks in (1, WORLD)}
            for plan in plans.values():  # what a first use verifies is no part of a picture
                _timed(pipe, plan, scale, 2)
            turns = [[_timed(pipe, plan, scale, steps) for plan in plans.values()] for _ in range(TURNS)]
            one, two = (median(sum(turn[place]) for turn in turns) for place in range(2))
            png = median(turn[1][1] for turn in turns)
            yield f"| {name} | {one:.1f} s | {two:.1f} s | {one / two:.2f}x | {png:.2f} s |"


def _timed(pipe: ParallelPipeline, plan: Plan, scale: int, steps: int) -> tuple[float, float]:
    """Seconds of the call and of the PNG, which has as many cores as the plan has ranks."""
    pipe.plan = plan
    side = scale * NATIVE
    start = time.perf_counter()
    picture = pipe(
        subjects(1)[0].caption,
        height=side,
        width=side,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    drawn = time.perf_counter()
    write_png(picture, io.BytesIO(), cores=plan.patch)
    return drawn - start, time.perf_counter() - drawn
