"""A whole large image on one rank and on two, from the prompt to the PNG, in turns: measured, not predicted."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

import torch

from benchmarks.highres.counting import subjects
from benchmarks.highres.generation import DEADLINE, GUIDANCE, NATIVE
from patchpar import ParallelPipeline, Plan, StructureGuidance

WORLDS, TURNS = (1, 2), 3


def rows(strategies: dict[str, StructureGuidance], *, scale: int, steps: int) -> Iterator[str]:
    """Medians of seconds, by strategy."""
    yield f"| {scale} x {scale}, {steps} steps | 1 rank | 2 ranks | faster | of that the PNG |"
    yield "|---|---|---|---|---|"
    with ExitStack() as opened:
        pipes = [opened.enter_context(_workers(world)) for world in WORLDS]
        for name, strategy in strategies.items():
            for pipe, world in zip(pipes, WORLDS, strict=True):
                pipe.plan = Plan(patch=world, strategy=strategy)
                _timed(pipe, scale, 2)  # what a first use verifies is no part of an image
            turns = [[_timed(pipe, scale, steps) for pipe in pipes] for _ in range(TURNS)]
            one, two = (median(sum(turn[group_rank]) for turn in turns) for group_rank in range(2))
            png = median(turn[1][1] for turn in turns)
            yield f"| {name} | {one:.1f} s | {two:.1f} s | {one / two:.2f}x | {png:.2f} s |"


def _workers(world: int) -> ParallelPipeline:
    """As many workers as cores that they see, so that each has one thread."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < max(WORLDS):
        sys.exit(f"two ranks of one thread each need {max(WORLDS)} cores, and there are {len(cores)}")
    os.sched_setaffinity(0, cores[:world])
    try:
        return ParallelPipeline.from_pretrained(
            "embedded", devices=f"cpu:{world}", plan=Plan(patch=world), deadline=DEADLINE, torch_dtype=torch.float32
        )
    finally:
        os.sched_setaffinity(0, cores)


def _timed(pipe: ParallelPipeline, scale: int, steps: int) -> tuple[float, float]:
    """Seconds of the call and of the PNG, which has as many cores as there are ranks."""
    pipe.set_progress_bar_config(disable=True)
    side = scale * NATIVE
    start = time.perf_counter()
    image = pipe(
        subjects(1)[0].caption,
        height=side,
        width=side,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    generated = time.perf_counter()
    image.save(io.BytesIO(), "PNG", compress_level=1)
    return generated - start, time.perf_counter() - generated
