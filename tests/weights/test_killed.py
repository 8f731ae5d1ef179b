"""A rank that holds a part of the weights is killed: a named error, and the pipeline's next call has all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline, WorkerDied
from tests import tiny
from tests.breadth import first_of

PLANS = [
    "patch=2,weights=sharded",
    "patch=2,weights=hosted",
    "stage=2",
    "stage=2,weights=hosted",
    "stage=2,strategy=piped:warmup_steps=1",
    "tensor=2",
    "tensor=2,weights=hosted",
]
EACH = [(plan, source, rank) for plan in PLANS for source in ("folder", "memory") for rank in (0, 1)]


@pytest.mark.parametrize(("plan", "source", "rank"), first_of(EACH, ("patch=2,weights=sharded", "folder", 1)))
def test_the_next_call_has_all_weights(tmp_path: Path, plan: str, source: str, rank: int) -> None:
    built = tiny.build("flux")
    call = {**built.call_kwargs, "num_inference_steps": 3, "output_type": "latent"}
    options: dict[str, Any] = {"devices": "cpu:2", "plan": plan}
    if source == "folder":
        built.pipe.save_pretrained(tmp_path)
        made = ParallelPipeline.from_pretrained(tmp_path, **options)
    else:
        made = ParallelPipeline(built.pipe, **options)
    with made as pipe:
        pipe.set_progress_bar_config(disable=True)

        def latents() -> torch.Tensor:
            return pipe(**call, generator=torch.Generator().manual_seed(0)).images

        wanted = latents()
        pipe.on_step = lambda step, total: os.kill(pipe._executor.pids[rank], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"rank {rank} .*SIGKILL"):
            latents()
        pipe.on_step = None
        assert torch.equal(latents(), wanted)
