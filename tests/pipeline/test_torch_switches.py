"""Switches of precision that a script sets hold on its ranks too, and its embeddings come to their devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline
from patchpar.launch.torch_switches import caller_switches, take_switches
from patchpar.pipeline.caller_values import with_embeddings_on
from tests.pipeline.callbacks import NotesSwitches
from tests.pipeline.conftest import EXACT, QUICK, Hold, generator, relative_error, tensor_of
from tests.tiny import build

SECONDS = 120.0
HALF = 0.05
"""Relative error of split networks in bfloat16."""


@pytest.fixture
def switches() -> Iterator[Any]:
    """As they are in a new process."""
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    yield caller_switches()
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_process_takes_those_of_another(switches: Any, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = False
    wanted = caller_switches()
    take_switches(switches)
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (True, "highest")
    take_switches(wanted)
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (False, precision)
    assert torch.backends.cuda.matmul.allow_tf32
    take_switches(None)
    assert caller_switches() == wanted


def test_ranks_compute_with_those_of_the_caller(switches: Any, parallel: ParallelPipeline) -> None:
    for is_on in (False, True):
        torch.backends.cudnn.allow_tf32 = is_on
        parallel(**QUICK, output_type="latent", callback_on_step_end=NotesSwitches())
        assert parallel.noted_allow_tf32 == is_on


def apart(got: Any, want: Any) -> float:
    """Relative error of latents that may differ in dtype."""
    x, y = (tensor_of(each).float() for each in (got, want))
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("plan", ["cfg=2", "patch=2"])
def test_ranks_compute_under_the_autocast_of_the_caller(hold: Hold, plan: str) -> None:
    """Calls and jobs, which run in threads of their own; torch keeps it by thread."""
    pipe, call = build("sdxl").pipe, {**QUICK, "output_type": "latent"}
    without = pipe(**call, generator=generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = pipe(**call, generator=generator())
    assert tensor_of(want).dtype == torch.bfloat16
    assert apart(without, want) > 100 * EXACT, "control"
    with hold(pipe) as parallel:
        parallel.plan = plan
        assert relative_error(parallel(**call, generator=generator()), without) <= EXACT
        with torch.autocast("cpu", dtype=torch.bfloat16):
            alone = parallel.submit(**call, generator=generator(), ranks=(1,), plan="single")
            split = parallel.submit(**call, generator=generator())
            called = parallel(**call, generator=generator())
        assert relative_error(alone.result(SECONDS), want) <= EXACT
        for each in (split.result(SECONDS), called):
            assert tensor_of(each).dtype == torch.bfloat16
            assert apart(each, want) <= HALF
        assert relative_error(parallel(**call, generator=generator()), without) <= EXACT


def test_methods_compute_under_the_autocast_of_the_caller(parallel: ParallelPipeline, plain: Any) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=generator())
    without = plain.vae.decode(latents, return_dict=False)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        want, got = (each.vae.decode(latents, return_dict=False)[0] for each in (plain, parallel))
    assert got.dtype == want.dtype == torch.bfloat16 != without.dtype
    assert torch.equal(got, want)


def test_a_job_in_this_process_computes_under_the_autocast_of_the_caller() -> None:
    pipe, call = build("sdxl").pipe, {**QUICK, "output_type": "latent"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = pipe(**call, generator=generator())
    with ParallelPipeline(pipe, devices="cpu") as one:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            job = one.submit(**call, generator=generator())
        assert relative_error(job.result(SECONDS), want) <= EXACT
        after = one(**call, generator=generator())
    assert apart(after, want) > 100 * EXACT


def test_embeddings_come_to_the_device_of_a_rank_and_images_stay() -> None:
    tensor = torch.ones(1, 2)
    given = {"prompt_embeds": [tensor], "ip_adapter_image_embeds": [[tensor]], "image": tensor, "prompt": "a fox"}
    given["prompt_attention_mask"], given["negative_prompt_embeds"] = tensor, None
    found = with_embeddings_on(torch.device("meta"), given)
    assert found["prompt_embeds"][0].is_meta
    assert found["ip_adapter_image_embeds"][0][0].is_meta
    assert found["prompt_attention_mask"].is_meta
    assert found["image"] is tensor
    assert (found["prompt"], found["negative_prompt_embeds"]) == ("a fox", None)
