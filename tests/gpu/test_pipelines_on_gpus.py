"""Whole pipelines on GPUs, as a user calls them: plans on one card and on several, streams, steps as graphs.

`python -m benchmarks.gpu.battery` runs these; `--gpu-device cpu` tries them on the CPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar import ParallelPipeline, StreamingPipeline, WorkerError
from patchpar.launch.accelerators import device_count, has_graphs

pytestmark = pytest.mark.gpu
FACE = Path(__file__).parents[2] / "assets" / "face-stream"
SCRIPT = Path(__file__).parent / "scripts" / "of_torchrun.py"
PROMPT, STEPS, SIZE = "a red house on the left, green hills at noon", 6, 256
PLANS = ("cfg=2", "patch=2", "patch=2,weights=sharded", "patch=2,weights=hosted", "stage=2", "tensor=2")
"""The last one is for transformers."""
PLANS_OF_FOUR = ("patch=4", "cfg=2,patch=2", "patch=4,weights=sharded")
APPROXIMATE = ("patch=2,strategy=displaced", "patch=2,strategy=pcpp", "patch=2,strategy=fresh-edges")
EXACT_PSNR, OTHER_PSNR = 55.0, 25.0
"""dB of images from 0 to 1. GPUs round convolutions in fp32 to TF32, and a band may be convolved by another kernel."""


@pytest.fixture(scope="module")
def card(kind: str) -> str:
    """The device that all ranks use."""
    return "cpu" if kind == "cpu" else f"{kind}:0"


def image(pipe: ParallelPipeline, plan: str = "", seed: int = 0) -> Tensor:
    if plan:
        pipe.plan = plan
    generator = torch.Generator().manual_seed(seed)
    given = {"num_inference_steps": STEPS, "height": SIZE, "width": SIZE, "output_type": "pt", "generator": generator}
    return pipe(PROMPT, **given).images[0].float().cpu()


def psnr(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert a.isfinite().all(), "a NaN is passed over by `min` wherever it does not come first"
    return float(-10 * torch.log10((a.double() - b.double()).square().mean() + 1e-12))


@pytest.fixture(scope="module", params=["embedded", "embedded-dit"])
def pair(request: pytest.FixtureRequest, card: str) -> Iterator[tuple[ParallelPipeline, Tensor]]:
    """Two ranks on the card, and the image of one."""
    with ParallelPipeline.from_pretrained(request.param, devices=[card]) as pipe:
        alone = image(pipe)
    with ParallelPipeline.from_pretrained(request.param, devices=[card] * 2) as pipe:
        yield pipe, alone


def test_plans_on_one_card(pair: tuple[ParallelPipeline, Tensor]) -> None:
    pipe, alone = pair
    plans = PLANS if pipe.description.splits_into_tokens else PLANS[:-1]
    found = {plan: psnr(image(pipe, plan), alone) for plan in plans}
    assert min(found.values()) > EXACT_PSNR, found
    assert psnr(image(pipe, "patch=2", seed=1), alone) < OTHER_PSNR, "another seed is another image"


def test_stale_strategies_on_one_card(pair: tuple[ParallelPipeline, Tensor]) -> None:
    pipe, alone = pair
    found = {plan: psnr(image(pipe, plan), alone) for plan in APPROXIMATE}
    assert min(found.values()) > OTHER_PSNR, found


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


@pytest.mark.parametrize("model", ["embedded", "embedded-dit"])
def test_steps_of_one_device_as_graphs(card: str, model: str) -> None:
    if not has_graphs(card.partition(":")[0]):
        pytest.skip("a CPU has no graphs")
    with ParallelPipeline.from_pretrained(model, devices=[card]) as pipe:
        wanted = [image(pipe, seed=seed) for seed in (0, 1)]
    with ParallelPipeline.from_pretrained(model, devices=[card], graphs=True) as pipe:
        for seed, replays in ((0, STEPS - 2), (1, STEPS - 1)):
            assert psnr(image(pipe, seed=seed), wanted[seed]) > EXACT_PSNR
            assert [rank.replayed_calls for rank in pipe.last_run.ranks] == [replays]


def test_graphs_on_two_cards_of_one_process(card: str) -> None:
    """A capture in a stream of the other card would have no kernel in it."""
    kind = card.partition(":")[0]
    if not has_graphs(kind) or device_count(kind) < 2:
        pytest.skip("needs two GPUs")
    with ParallelPipeline.from_pretrained("embedded", devices=[card]) as pipe:
        wanted = image(pipe)
    for device in (card, f"{kind}:1"):
        with ParallelPipeline.from_pretrained("embedded", devices=[device], graphs=True) as pipe:
            assert psnr(image(pipe), wanted) > EXACT_PSNR, device
            assert [rank.replayed_calls for rank in pipe.last_run.ranks] == [STEPS - 2]


def test_weights_in_host_memory_on_one_device(card: str) -> None:
    """Of one pipeline after the other: memory that stayed pinned would be read for what is mapped there next."""
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        given = {"devices": [card], "torch_dtype": dtype}
        with ParallelPipeline.from_pretrained("embedded-dit", **given) as pipe:
            alone = image(pipe)
        with ParallelPipeline.from_pretrained("embedded-dit", **given, plan="weights=hosted") as pipe:
            assert psnr(image(pipe), alone) > (EXACT_PSNR if dtype == torch.float32 else OTHER_PSNR)


def test_stages_of_a_stream_on_one_card(card: str) -> None:
    """Two stages give what one does, block by block."""
    one, two = (_frames([card] * ranks) for ranks in (1, 2))
    assert one.shape == two.shape
    assert one.std() > 0.05
    assert psnr(one, two) > EXACT_PSNR


def _frames(devices: Any) -> Tensor:
    with (
        StreamingPipeline.from_pretrained(FACE, devices=devices, variant="fp16") as pipe,
        pipe.stream("happy", seconds=1.0) as session,
    ):
        return torch.cat([torch.as_tensor(chunk.frames).float() / 255 for chunk in session])
