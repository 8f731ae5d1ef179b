"""Whole pipelines on one GPU, as a user calls them: plans, streams, steps as graphs.

`python -m benchmarks.gpu.battery` runs these; `--gpu-device cpu` tries them on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar import ParallelPipeline, StreamingPipeline
from patchpar.launch.accelerators import device_count, has_graphs
from tests.gpu.gpu_images import APPROXIMATE, EXACT_PSNR, OTHER_PSNR, PLANS, STEPS, image, psnr

pytestmark = pytest.mark.gpu
FACE = Path(__file__).parents[2] / "assets" / "face-stream"


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
