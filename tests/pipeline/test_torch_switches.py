"""Switches of precision that a script sets hold on its ranks too, and its embeddings come to their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchpar import ParallelPipeline
from patchpar.pipeline.caller_values import with_embeddings_on
from patchpar.shard.torch_switches import caller_switches, under_switches
from tests.pipeline.callbacks import NotesSwitches
from tests.pipeline.conftest import EXACT, QUICK, Hold, generator, relative_error, tensor_of
from tests.tiny import build

SECONDS = 120.0
HALF = 0.05
"""Relative error of split networks in bfloat16."""
Change = Callable[[], object]


def deterministic(warn_only: bool) -> Change:
    return lambda: torch.use_deterministic_algorithms(True, warn_only=warn_only)


def with_benchmarks() -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, True
    torch.backends.cudnn.allow_tf32 = False


CHANGES: dict[str, Change] = {
    "precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "cuDNN": with_benchmarks,
    "deterministic algorithms": deterministic(warn_only=False),
    "warnings of others": deterministic(warn_only=True),
    "no flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "no attention of cuDNN": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "no efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
}
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "one kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "an order of kernels": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "diffusers' attention": lambda: attention_backend("flex"),
}


@pytest.fixture
def switches() -> Iterator[Any]:
    """As they are in a new process."""
    before = caller_switches()
    with under_switches(before):
        yield before
    assert exact(caller_switches()) == exact(before)


@contextmanager
def changed(which: str) -> Iterator[None]:
    """Change a switch as a script does: for good, or in a context."""
    with CONTEXTS.get(which, nullcontext)():
        CHANGES.get(which, lambda: None)()
        yield


def exact(switches: Mapping[str, Any] | None) -> dict[str, Any]:
    """Switches by name: of products, torch has two words for the same."""
    return {name: "ieee" if value == "none" else value for name, value in (switches or {}).items()}


@pytest.mark.parametrize("which", [*CHANGES, *CONTEXTS])
def test_a_process_takes_those_of_another(switches: Any, which: str) -> None:
    with changed(which):
        wanted = caller_switches()
    assert exact(wanted) != exact(switches)
    with under_switches(switches):
        assert exact(caller_switches()) == exact(switches)
        with under_switches(wanted):
            assert exact(caller_switches()) == exact(wanted)
        assert exact(caller_switches()) == exact(switches)
        with under_switches(None):
            assert exact(caller_switches()) == exact(switches)


@pytest.mark.parametrize("which", [*CHANGES, *CONTEXTS])
def test_ranks_compute_with_those_of_the_caller(switches: Any, parallel: ParallelPipeline, which: str) -> None:
    """In calls, and in jobs that run after the caller has left a context."""
    call = {**QUICK, "output_type": "latent", "callback_on_step_end": NotesSwitches()}
    with changed(which):
        wanted = caller_switches()
        parallel(**call)
        assert exact(parallel.noted_switches) == exact(wanted)
    with under_switches(switches):
        parallel(**call)
        assert exact(parallel.noted_switches) == exact(switches)
        with changed(which):
            job = parallel.submit(**call)
        with under_switches(switches):
            job.result(SECONDS)
            assert exact(parallel.noted_switches) == exact(wanted)


@pytest.mark.parametrize(
    ("name", "which"), [("sdxl", "default dtype"), ("flux", "diffusers' attention"), ("sd3", "one kernel of attention")]
)
def test_images_are_those_of_one_process_with_them(hold: Hold, switches: Any, name: str, which: str) -> None:
    pipe, call = build(name).pipe, {**QUICK, "output_type": "latent"}
    without = tensor_of(pipe(**call, generator=generator()))
    with changed(which):
        want = tensor_of(pipe(**call, generator=generator()))
    assert torch.equal(want, without) == (which == "default dtype"), "control: a pipeline names the dtypes of all"
    with under_switches(switches), hold(pipe) as parallel:
        parallel.plan = "patch=2"
        with changed(which):
            split = tensor_of(parallel(**call, generator=generator()))
            alone = parallel.submit(**call, generator=generator(), ranks=(1,), plan="single")
        assert split.dtype == want.dtype
        assert apart(split, want) <= EXACT
        assert torch.equal(tensor_of(alone.result(SECONDS)), want)


def test_methods_compute_with_those_of_the_caller(switches: Any, parallel: ParallelPipeline, plain: Any) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=generator())
    with changed("one kernel of attention"), torch.no_grad():
        want, got = (each.vae.decode(latents, return_dict=False)[0] for each in (plain, parallel))
    with torch.no_grad():
        without = plain.vae.decode(latents, return_dict=False)[0]
    assert torch.equal(got, want)
    assert not torch.equal(got, without), "control"


def apart(got: Any, want: Any) -> float:
    """Relative error of latents that may differ in dtype."""
    x, y = ((each if isinstance(each, torch.Tensor) else tensor_of(each)).float() for each in (got, want))
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
