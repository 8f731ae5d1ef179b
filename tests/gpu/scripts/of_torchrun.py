"""Run by torchrun on two ranks; writes rank 0's image, and what carries the messages, to the file of its argument."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from patchpar import ParallelPipeline

PLAN, PROMPT, STEPS, SIZE, RESULT = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
DEVICE = sys.argv[6] if len(sys.argv) > 6 else "auto"
with ParallelPipeline.from_pretrained("embedded", devices=DEVICE, plan=PLAN) as pipe:
    call = {"num_inference_steps": STEPS, "height": SIZE, "width": SIZE, "output_type": "pt"}
    found = pipe(PROMPT, **call, generator=torch.Generator().manual_seed(0)).images
    backend = dist.get_backend() if dist.is_initialized() else "memory of the host"
    if pipe._executor.rank == 0:
        torch.save((backend, found[0].float().cpu()), RESULT)
