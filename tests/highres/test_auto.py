"""plan="auto" generates large images as plain diffusers does, with advice; an upscaled one by structure guidance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from patchpar import ParallelPipeline, Plan, PlanError, StructureGuidance, upscale
from patchpar.cli.compare import of_one
from patchpar.cli.flags import plan_of
from patchpar.errors import UnsupportedModel
from patchpar.launch.accelerators import free_bytes
from patchpar.models.info import PipelineInfo, describe
from patchpar.pipeline.auto_plan import choose, choose_for_upscale, without
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.native_size import TESTED, why_native_only
from patchpar.strategies.structure.sizing import COPIES, MemoryEstimate, check_room
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny import build
from tests.tiny.sample_images import scene
from tests.vae.allocations import Allocations

from .generation import Case, alone, plain

NATIVE = 128
LARGE = {"height": 256, "width": 192, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def model() -> PipelineInfo:
    """Of a pipeline that was made for 128 x 128 pixels."""
    return replace(describe(build("sd").pipe), native_only_reason="")


@pytest.mark.parametrize(
    ("devices", "size", "plan", "upscaled"),
    [
        (4, (256, 192), "cfg=2,patch=2,strategy=exact", "patch=4,strategy=structure"),
        (1, (256, 192), "single", "strategy=structure"),
        (4, (256, 184), "cfg=2,patch=2,strategy=exact", None),  # 1.44 times on one side
        (4, (512, 128), "cfg=2,patch=2,strategy=exact", None),
        (4, (128, 128), "cfg=2,patch=2,strategy=exact", None),
        (64, (256, 256), "cfg=2,patch=4,strategy=exact", "patch=18,strategy=structure"),
    ],
)
def test_a_large_image_is_exact_with_advice_and_upscaled_by_structure_guidance(
    model: PipelineInfo, devices: int, size: tuple[int, int], plan: str, upscaled: str | None
) -> None:
    call = {"height": size[0], "width": size[1]}
    choice, larger = choose(model, devices, call), choose_for_upscale(model, devices, call)
    assert str(choice.plan) == plan
    assert str(larger.plan) == (upscaled or plan)
    assert (f"plan={upscaled!r} (--strategy structure)" in choice.advice) == (upscaled is not None)
    assert bool(choice.advice) == (upscaled is not None)
    assert ("times the native 128 x 128: structure guidance" in larger.reason) == (upscaled is not None)
    assert ("46 of 64 devices idle: no more windows" in larger.reason) == (devices == 64)


def test_without_where_it_cannot_be(model: PipelineInfo) -> None:
    """Each time with the reason; a call that fails teaches an automatic plan."""
    refused = replace(model, native_only_reason="thresholding")
    assert choose_for_upscale(refused, 2, LARGE).plan == Plan(cfg=2)
    assert choose_for_upscale(refused, 2, LARGE).reason.endswith("128 x 128, but no structure guidance: thresholding")
    unknown = replace(model, native_only_reason=None)
    assert choose_for_upscale(unknown, 2, LARGE).plan == Plan(cfg=2)
    assert [choose(info, 2, LARGE).advice for info in (refused, unknown)] == ["", ""]
    boxes = choose_for_upscale(model, 2, {**LARGE, "cross_attention_kwargs": {"gligen": {}}})
    assert "gligen has positions in the whole image" in boxes.reason
    scaled = choose_for_upscale(model, 2, {**LARGE, "cross_attention_kwargs": {"scale": 0.5}})
    assert scaled.plan.strategy == StructureGuidance()
    learnt = without(model, scaled.plan, UnsupportedModel("packed in its own way"))
    assert learnt is not None
    assert choose_for_upscale(learnt, 2, LARGE).reason.endswith("packed in its own way")
    assert without(model, Plan(cfg=2), PlanError("another")) is None


BUILT = {"sd": "", "sd_img2img": "", "sdxl": "", "sd3": "", "flux": "", "sd_controlnet": "is not tested with structure"}


@pytest.mark.parametrize("name", first_of(BUILT, "sdxl", "flux", "sd_controlnet"))
def test_what_pipelines_say_of_themselves(name: str) -> None:
    pipe = build(name).pipe
    why = why_native_only(pipe)
    assert (BUILT[name] in why) if BUILT[name] else why == ""
    assert (type(pipe).__name__ in TESTED) == (why == "")


def test_a_large_image_is_that_of_plain_diffusers_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    """Advice is logged once for each size; asked for by name, the image is that of structure guidance."""
    case = Case(options={"native": NATIVE, "switch": None}, arguments={"height": 192, "width": 192})
    call: dict[str, Any] = {**build("sd").call_kwargs, **case.arguments, "num_inference_steps": case.steps}

    def generate(pipe: ParallelPipeline, **options: Any) -> Tensor:
        return pipe(**call | options, generator=torch.Generator().manual_seed(0), output_type="latent").images

    with ParallelPipeline(build("sd").pipe, devices="cpu:1") as pipe:
        pipe.set_progress_bar_config(disable=True)
        exact = [generate(pipe), generate(pipe)]
        assert all(torch.equal(image, plain(case)) for image in exact)
        advice = "1.5 times the native 128 x 128: at such sizes models repeat objects. plan='strategy=structure' "
        assert advice in pipe.explain()
        assert sum(advice in record.getMessage() for record in caplog.records) == 1
        small = {"height": NATIVE, "width": NATIVE}
        assert torch.equal(generate(pipe, **small), plain(Case(arguments=small)))
        assert pipe.explain().endswith("one device: the plain pipeline")
        pipe.plan = "strategy=structure"
        asked = generate(pipe)
        assert relative(asked, alone(case)) < 1e-5
        assert relative(asked, exact[0]) > 1e-2  # the negative control
        assert sum("repeat objects" in record.getMessage() for record in caplog.records) == 1


def test_a_scheduler_may_speak_against_it() -> None:
    with ParallelPipeline(build("sd_img2img").pipe, devices="cpu:1") as pipe:
        pipe.set_progress_bar_config(disable=True)
        own = build("sd_img2img").pipe.scheduler
        pipe.scheduler = diffusers.DDIMScheduler.from_config(own.config, thresholding=True)
        upscale(pipe, scene(128, 128), scale=1.5, num_inference_steps=6)
        assert "no structure guidance: DDIMScheduler has thresholding=True" in pipe.explain()


def test_memory_is_estimated_first(model: PipelineInfo) -> None:
    """What the latents take, on all ranks that share memory; a rank's decoding is said, not refused."""
    takes = MemoryEstimate.of(model, (4096, 4096), 2)
    assert takes.latents == 12 * 2 * 4 * 512 * 512 * 4
    check_room(model, (4096, 4096), 2, ranks=4, free=4 * takes.latents)
    check_room(model, (4096, 4096), 2, ranks=4, free=None)
    with pytest.raises(PlanError, match=r"4096 x 4096 pixels need about 384\.0 MiB .* 4 ranks, but only 96\.0 MiB are"):
        check_room(model, (4096, 4096), 2, ranks=4, free=takes.latents)
    with pytest.raises(PlanError, match="ask for at most 2048 x 2048"):
        check_room(model, (4096, 4096), 2, ranks=4, free=takes.latents)
    assert "18.0 MiB to decode" in choose_for_upscale(model, 2, LARGE).reason


def test_memory_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver has free, and what torch has reserved and not allocated; of a CPU the caller knows."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * 2**30)
    assert free_bytes(torch.device("cuda", 1)) == 6 * 2**30
    assert free_bytes(torch.device("cpu")) is None


@torch.no_grad()
@pytest.mark.parametrize(("fraction", "fits"), [(1.0, True), (0.9, False)])
def test_latents_beyond_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch, fraction: float, fits: bool) -> None:
    """On the rank that has the GPU, before it evaluates anything; images of a batch count each."""
    tiny, x = build("sd"), torch.randn(4, 4, 48, 48)
    need = COPIES * x.nbytes
    monkeypatch.setattr("patchpar.strategies.structure.denoiser.free_bytes", lambda device: int(fraction * need))
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
    assert plan_of("auto", "structure:lag=1", "cpu:3") == Plan(patch=3, strategy=StructureGuidance(lag=1))
    assert plan_of("patch=2", "structure", "cpu:3") == Plan(patch=2, strategy=StructureGuidance())
    with pytest.raises(PlanError, match="--strategy pcpp needs a plan to go with"):
        plan_of("auto", "pcpp", "cpu:3")


def test_compared_with_the_same_on_one_process() -> None:
    assert of_one(Plan(cfg=2)) == Plan()
    assert of_one(Plan(patch=4, strategy="displaced")) == Plan()
    large = StructureGuidance(lag=1)
    assert of_one(Plan(patch=4, strategy=large)) == Plan(strategy=large)
