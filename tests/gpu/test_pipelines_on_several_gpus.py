"""Whole pipelines with a GPU for each rank: plans, under torchrun, and after a worker was killed.

`python -m benchmarks.gpu.battery` runs these; `--ranks-per-gpu` lets ranks share a GPU over NCCL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline, WorkerError
from tests.gpu.gpu_images import APPROXIMATE, EXACT_PSNR, OTHER_PSNR, PLANS, PROMPT, SIZE, STEPS, image, psnr

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "scripts" / "of_torchrun.py"
PLANS_OF_FOUR = ("patch=4", "cfg=2,patch=2", "patch=4,weights=sharded")


@pytest.mark.parametrize("graphs", [False, "auto"])
@pytest.mark.parametrize("model", ["embedded", "embedded-dit"])
def test_plans_with_a_card_each(card: str, cards: Callable[..., list[str]], model: str, graphs: Any) -> None:
    """Ranks exchange through NCCL; where all can be captured, their steps are graphs."""
    devices = cards()
    number = 4 if len(devices) >= 4 else 2
    with ParallelPipeline.from_pretrained(model, devices=[card]) as pipe:
        alone = image(pipe)
    with ParallelPipeline.from_pretrained(model, devices=devices[:number], graphs=graphs) as pipe:
        of_two = PLANS if pipe.description.splits_into_tokens else PLANS[:-1]
        exact = PLANS_OF_FOUR if number == 4 else of_two
        stale = [plan.replace("patch=2", f"patch={number}") for plan in APPROXIMATE]
        found = {plan: psnr(image(pipe, plan), alone) for plan in (*exact, *stale)}
    assert min(found[plan] for plan in exact) > EXACT_PSNR, found
    assert min(found[plan] for plan in stale) > OTHER_PSNR, found


def test_ranks_of_torchrun(card: str, cards: Callable[..., list[str]], tmp_path: Path) -> None:
    """Of scripts that torchrun has started, with a card each."""
    cards(most=2)
    result = tmp_path / "image.pt"
    arguments = ["patch=2", PROMPT, str(STEPS), str(SIZE), str(result), *(["cpu"] if card == "cpu" else [])]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*launcher, str(SCRIPT), *arguments], timeout=300, check=True)
    backend, found = torch.load(result)
    assert backend == ("memory of the host" if card == "cpu" else "nccl")
    with ParallelPipeline.from_pretrained("embedded", devices=[card]) as pipe:
        assert psnr(found, image(pipe)) > EXACT_PSNR


def test_a_worker_that_is_killed_with_a_card_each(card: str, cards: Callable[..., list[str]]) -> None:
    """The others wait for it in NCCL. They are free again within the deadline, and the next image is as before."""
    with ParallelPipeline.from_pretrained("embedded", devices=cards(most=2), deadline=20.0) as pipe:
        wanted, pids = image(pipe, "patch=2"), pipe._executor.pids

        def kill(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            os.kill(pids[1], signal.SIGKILL)
            return tensors

        with pytest.raises(WorkerError, match="rank 1"):
            pipe(PROMPT, num_inference_steps=STEPS, height=SIZE, width=SIZE, callback_on_step_end=kill)
        assert psnr(image(pipe), wanted) > EXACT_PSNR
