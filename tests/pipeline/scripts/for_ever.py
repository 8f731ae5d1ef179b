"""Draws for very long; says so when it has begun. Reads MODEL from argv."""

from __future__ import annotations

import sys

from patchpar import ParallelPipeline

with ParallelPipeline.from_pretrained(sys.argv[1], devices="cpu:2") as pipe:
    pipe.on_step = lambda step, total: (sys.stdout.write(f"step {step}\n"), sys.stdout.flush())
    pipe("a small red house", height=128, width=128, num_inference_steps=999)
