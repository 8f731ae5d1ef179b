"""plan="auto" takes structure guidance for large pictures, says so, and does without where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from patchpar import ParallelPipeline, Plan, PlanError, StructureGuidance
from patchpar.cli.compare import of_one
from patchpar.cli.flags import plan_of
from patchpar.errors import UnsupportedModel
from patchpar.launch.accelerators import free_bytes
from patchpar.models.info import PipelineInfo, describe
from patchpar.pipeline.auto_plan import choose, without
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.native_size import TESTED, why_native_only
from patchpar.strategies.structure.sizing import COPIES, GIB, MemoryEstimate, check_room
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny import build
from tests.vae.allocations import Allocations

from .drawing import Case, alone, plain

NATIVE = 128
LARGE = {"height": 256, "width": 192, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def model() -> PipelineInfo:
    """Of a pipeline that was made for 128 x 128 pixels."""
    return replace(describe(build("sd").pipe), native_only_reason="")


@pytest.mark.parametrize(
    ("devices", "size", "plan"),
    [
        (4, (256, 192), "patch=4,strategy=asg"),
        (1, (256, 192), "strategy=asg"),
        (4, (256, 184), "cfg=2,patch=2,strategy=exact"),  # 1.44 times on one side
        (4, (512, 128), "cfg=2,patch=2,strategy=exact"),
        (4, (128, 128), "cfg=2,patch=2,strategy=exact"),
        (64, (256, 256), "patch=18,strategy=asg"),
    ],
)
def test_from_half_as_large_again_on_both_sides(
    model: PipelineInfo, devices: int, size: tuple[int, int], plan: str
) -> None:
    choice = choose(model, devices, {"height": size[0], "width": size[1]})
    assert str(choice.plan) == plan
    led = isinstance(choice.plan.strategy, StructureGuidance)
    assert led == (min(size) >= 1.5 * NATIVE)
    assert ("times the native 128 x 128: structure guidance" in choice.reason) == led
    assert ("46 of 64 devices idle: no more windows" in choice.reason) == (devices == 64)


def test_without_where_it_cannot_be(model: PipelineInfo) -> None:
    """Each time with the reason; a call that fails teaches an automatic plan."""
    refused = replace(model, native_only_reason="thresholding")
    assert choose(refused, 2, LARGE).plan == Plan(cfg=2)
    assert choose(refused, 2, LARGE).reason.endswith("128 x 128, but no structure guidance: thresholding")
    assert choose(replace(model, native_only_reason=None), 2, LARGE).plan == Plan(cfg=2)
    boxes = choose(model, 2, {**LARGE, "cross_attention_kwargs": {"gligen": {}}})
    assert "gligen has positions in the whole image" in boxes.reason
    scaled = choose(model, 2, {**LARGE, "cross_attention_kwargs": {"scale": 0.5}})
    assert scaled.plan.strategy == StructureGuidance()
    learnt = without(model, scaled.plan, UnsupportedModel("packed in its own way"))
    assert learnt is not None
    assert choose(learnt, 2, LARGE).reason.endswith("packed in its own way")
    assert without(model, Plan(cfg=2), PlanError("another")) is None


BUILT = {"sd": "", "sd_img2img": "", "sdxl": "", "sd3": "", "flux": "", "sd_controlnet": "is not tested with structure"}


@pytest.mark.parametrize("name", first_of(BUILT, "sdxl", "flux", "sd_controlnet"))
def test_what_pipelines_say_of_themselves(name: str) -> None:
    pipe = build(name).pipe
    why = why_native_only(pipe)
    assert (BUILT[name] in why) if BUILT[name] else why == ""
    assert (type(pipe).__name__ in TESTED) == (why == "")


def test_on_one_device() -> None:
    """The picture does not depend on the number of devices, so that one takes it too; a scheduler may speak against."""
    case = Case(options={"native": NATIVE, "switch": None}, arguments={"height": 192, "width": 192})
    generator = {"generator": torch.Generator().manual_seed(0)}
    call: dict[str, Any] = {**build("sd").call_kwargs, **case.arguments, "num_inference_steps": case.steps}
    with ParallelPipeline(build("sd").pipe, devices="cpu:1") as pipe:
        pipe.set_progress_bar_config(disable=True)
        got = pipe(**call | generator, output_type="latent").images
        assert relative(got, alone(case)) < 1e-5
        assert "1.5 times the native 128 x 128: structure guidance; about" in pipe.explain()
        own = build("sd").pipe.scheduler
        pipe.scheduler = diffusers.DDIMScheduler.from_config(own.config, thresholding=True)
        pipe(**call, output_type="latent")
        assert "no structure guidance: DDIMScheduler has thresholding=True" in pipe.explain()
        pipe.scheduler = own
        small = call | {"height": NATIVE, "width": NATIVE, "generator": torch.Generator().manual_seed(0)}
        same = Case(arguments={"height": NATIVE, "width": NATIVE})
        assert torch.equal(pipe(**small, output_type="latent").images, plain(same))
        assert pipe.explain().endswith("one device: the plain pipeline")


def test_memory_is_estimated_first(model: PipelineInfo) -> None:
    """What the latents take, on all ranks that share memory; a rank's decoding is said, not refused."""
    takes = MemoryEstimate.of(model, (4096, 4096), 2)
    assert takes.latents == 12 * 2 * 4 * 512 * 512 * 4
    check_room(model, (4096, 4096), 2, ranks=4, free=4 * takes.latents)
    check_room(model, (4096, 4096), 2, ranks=4, free=None)
    with pytest.raises(PlanError, match=r"4096 x 4096 pixels need about 0\.4 GiB .* on 4 ranks, but only 0\.1 GiB are"):
        check_room(model, (4096, 4096), 2, ranks=4, free=takes.latents)
    with pytest.raises(PlanError, match="ask for at most 2048 x 2048"):
        check_room(model, (4096, 4096), 2, ranks=4, free=takes.latents)
    assert "GiB to decode" in choose(model, 2, LARGE).reason


def test_memory_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver has free, and what torch has reserved and not allocated; of a CPU the caller knows."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    assert free_bytes(torch.device("cuda", 1)) == 6 * GIB
    assert free_bytes(torch.device("cpu")) is None


@torch.no_grad()
@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (0.9, False)])
def test_latents_beyond_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch, share: float, fits: bool) -> None:
    """On the rank that has the GPU, before it evaluates anything; pictures of a batch count each."""
    tiny, x = build("sd"), torch.randn(4, 4, 48, 48)
    need = COPIES * x.nbytes
    monkeypatch.setattr("patchpar.strategies.structure.denoiser.free_bytes", lambda device: int(share * need))
    found = StructureGuidance(switch=0.5).install(tiny.denoiser, None, Axis("patch"), pipe=tiny.pipe)  # type: ignore[arg-type]
    found.reset()
    asked: list[Tensor] = []

    def forward(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
        asked.append(x)
        return (x,)

    text = {"encoder_hidden_states": torch.zeros(4, 77, 32)}
    if fits:
        found.denoise(forward, x, torch.tensor(801), **text)
        assert asked
        return
    with pytest.raises(PlanError, match=r"384 x 384 pixels need about .* on 1 rank, .* ask for at most 360 x 360"):
        found.denoise(forward, x, torch.tensor(801), **text)
    assert not asked


@torch.no_grad()
@pytest.mark.parametrize("time", [801, 201])
def test_no_more_is_held_than_estimated(time: int) -> None:
    """Beside what the denoiser itself takes; the scheduler's own share of the estimate is not seen here."""
    tiny, x = build("sd"), torch.randn(2, 4, 48, 48)
    found = StructureGuidance(switch=0.5).install(tiny.denoiser, None, Axis("patch"), pipe=tiny.pipe)  # type: ignore[arg-type]
    found.reset()
    with Allocations() as held:
        found.denoise(lambda x, *_, **__: (x,), x, torch.tensor(time), encoder_hidden_states=torch.zeros(2, 77, 32))
    assert 2 * x.nbytes < held.peak < COPIES * x.nbytes


def test_on_the_command_line_it_needs_no_plan() -> None:
    """All devices take part; other strategies must be told how many."""
    assert plan_of("auto", "asg:lag=1", "cpu:3") == Plan(patch=3, strategy=StructureGuidance(lag=1))
    assert plan_of("patch=2", "asg", "cpu:3") == Plan(patch=2, strategy=StructureGuidance())
    with pytest.raises(PlanError, match="--strategy pcpp needs a plan to go with"):
        plan_of("auto", "pcpp", "cpu:3")


def test_compared_with_the_same_on_one_process() -> None:
    assert of_one(Plan(cfg=2)) == Plan()
    assert of_one(Plan(patch=4, strategy="displaced")) == Plan()
    large = StructureGuidance(lag=1)
    assert of_one(Plan(patch=4, strategy=large)) == Plan(strategy=large)
