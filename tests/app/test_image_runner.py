"""A job generates in the way that was chosen, shows every step, ends between two steps, and keeps what the run says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from app.comparison import compare
from app.high_res import UpscaleRequest, generate_high_res, high_res_preset, upscale_image
from app.html import facts
from app.image_runner import READY_STEPS, ImageJobRunner, JobImage, RunOptions, WatchedCall, image_of
from app.job_queue import Cancelled, Job, JobQueue, JobView
from app.presets import preset_named, presets_for
from app.requests import GenerateRequest
from patchpar import PlanError, StructureGuidance
from patchpar.serving.latent_preview import ColourMap

from .fakes import FakePipeline, FakeWorkers
from .waits import over, until

REQUEST = GenerateRequest(prompt="a fox", steps=3, seed=5)
PRESETS = {preset.label: preset for preset in presets_for(2)}


def make_runner(**options: Any) -> ImageJobRunner:
    return ImageJobRunner(FakeWorkers(FakePipeline(**options)))  # type: ignore[arg-type]


def test_an_image_comes_with_its_run_and_its_steps(queue: JobQueue) -> None:
    runner = make_runner()
    seen = []
    job = queue.submit("A", "image", lambda job: runner.generate(job, REQUEST, presets_for(2)[0]))
    view = over(job)
    seen.append(view)
    assert (view.state, view.step, view.steps, view.note) == ("done", 3, 3, "generating")
    found: JobImage = view.result
    assert found.image.size == (64, 64)
    assert found.run.seconds == 0.5
    assert found.values is None
    pipe: Any = runner.workers.image_pipeline()
    (call,) = pipe.calls
    assert call["prompt"] == "a fox"
    assert call["generator"].initial_seed() == 5
    assert (pipe.tracing, pipe.on_step, pipe.on_latents) == (False, None, None)  # left as they were


@pytest.mark.parametrize(
    ("label", "plan"),
    [
        ("Automatic, 2 devices", "auto"),
        ("One device", "restored"),
        ("Guidance branches", "cfg=2"),
        ("2 bands, exact", "patch=2,strategy=exact"),
    ],
)
def test_the_preset_is_the_plan(queue: JobQueue, label: str, plan: str) -> None:
    runner = make_runner()
    over(queue.submit("A", "image", lambda job: runner.generate(job, REQUEST, preset_named(label, 2))))
    pipe: Any = runner.workers.image_pipeline()
    assert [str(each) for each in pipe.plans] == [plan]


def test_previews_come_as_soon_as_one_image_has_been_generated(queue: JobQueue) -> None:
    """One after each step; the first image, which `prepare` generates, has none."""
    runner = make_runner()
    assert previews_of(queue, runner.prepare) == [None] * READY_STEPS
    sizes = previews_of(queue, lambda job: runner.generate(job, REQUEST, presets_for(2)[0]))
    assert sizes == [(128, 128)] * REQUEST.steps


def previews_of(queue: JobQueue, work: Callable[[Job], Any]) -> list[Any]:
    """The sizes of previews, as a job reports them; once it has ended its page has none, but the image itself."""
    found: list[Any] = []

    def watched(job: Job) -> Any:
        original = job.show

        def show(**changes: Any) -> None:
            if "preview" in changes:
                found.append(changes["preview"] and changes["preview"].size)
            original(**changes)

        job.show = show  # type: ignore[method-assign]
        return work(job)

    assert over(queue.submit("A", "image", watched)).preview is None
    return found


def test_packed_latents_have_previews_too() -> None:
    """As of FLUX: tokens of 2 x 2 cells, in rows."""
    views: list[JobView] = []
    job: Any = SimpleNamespace(show=lambda **changes: views.append(JobView(**changes)), check=lambda: None)
    watched = WatchedCall(job, "generating", ColourMap(), (96, 64), has_callback=True)
    tokens = torch.rand(1, 24, 8, generator=torch.Generator().manual_seed(0))
    watched.receive(2, 2, tokens)
    watched.fit_colours(Image.effect_noise((96, 64), 60).convert("RGB"))
    watched.receive(1, 2, tokens)
    assert [view.preview and view.preview.size for view in views] == [None, (192, 128)]
    watched.receive(1, 2, torch.rand(1, 23, 8))
    assert len(views) == 2, "no rows of this image"


def test_seconds_are_left_from_the_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[JobView] = []
    job: Any = SimpleNamespace(show=lambda **changes: views.append(JobView(**changes)))
    watched = WatchedCall(job, "generating", ColourMap(), (64, 64), has_callback=True)
    for step, now in ((1, 10.0), (2, 12.0), (3, 13.0), (10, 20.0), (1, 30.0), (2, 31.0)):
        monkeypatch.setattr("app.image_runner.time.monotonic", lambda now=now: now)
        watched.count(step, 10)
    assert [view.seconds_left for view in views] == [None, 16.0, 10.5, 0.0, None, 8.0]


@pytest.mark.parametrize("has_callback", [True, False])
def test_cancelling_ends_it_between_two_steps(queue: JobQueue, has_callback: bool) -> None:
    runner = make_runner(has_callback=has_callback)
    pipe: Any = runner.workers.image_pipeline()
    pipe.go.clear()
    job = queue.submit("A", "image", lambda job: runner.generate(job, REQUEST, presets_for(2)[0]))
    until(lambda: pipe.calls, "the call")
    queue.cancel("A")
    pipe.go.set()
    assert over(job).state == "cancelled"
    assert (
        over(queue.submit("A", "image", lambda job: runner.generate(job, REQUEST, presets_for(2)[0]))).state == "done"
    )


def test_a_pipeline_with_callbacks_is_never_left_in_the_middle() -> None:
    """An exception out of on_step would cost the workers; out of the callback it does not."""
    runner = make_runner()
    pipe: Any = runner.workers.image_pipeline()

    class Unwanted:
        def show(self, **changes: Any) -> None: ...

        def check(self) -> None:
            if pipe.calls:
                raise Cancelled

    original = pipe.__class__.__call__
    raised: list[str] = []

    def spied(self: Any, **arguments: Any) -> Any:
        on_step, self.on_step = self.on_step, None
        try:
            on_step(1, 3)
        except Cancelled:
            raised.append("on_step")
        return original(self, **arguments)

    pipe.__class__ = type("Spied", (FakePipeline,), {"__call__": spied})
    with pytest.raises(Cancelled):
        runner.generate(Unwanted(), REQUEST, presets_for(2)[0])  # type: ignore[arg-type]
    assert raised == []


def test_two_presets_are_compared_on_exact_values(queue: JobQueue) -> None:
    runner = make_runner()
    presets = (PRESETS["2 bands, exact"], PRESETS["One device"])
    found = over(queue.submit("A", "compare", lambda job: compare(runner, job, REQUEST, presets))).result
    assert found.largest == pytest.approx(0.01, abs=1e-6)
    assert found.psnr_db == pytest.approx(40, abs=0.1)
    assert "PSNR 40.0 dB" in found.summary
    assert [row[0] for row in found.rows(("left", "right"))] == ["left", "right"]
    pipe: Any = runner.workers.image_pipeline()
    assert [call["num_inference_steps"] for call in pipe.calls] == [2, 3, 2, 3]  # each warmed up before it is timed
    same = over(
        queue.submit("A", "compare", lambda job: compare(runner, job, REQUEST, (presets[0], presets[0])))
    ).result
    assert same.summary == "The images are bit-equal."


def test_large_images_are_led_by_structure_guidance(queue: JobQueue) -> None:
    runner, preset = make_runner(), high_res_preset(2, "overlap=0.25")
    found = over(
        queue.submit("A", "high-res", lambda job: generate_high_res(runner, job, REQUEST, preset, baseline=True))
    ).result
    assert found.baseline is not None
    pipe: Any = runner.workers.image_pipeline()
    guided, direct = pipe.plans
    assert isinstance(guided.strategy, StructureGuidance)
    assert (guided.strategy.overlap, guided.patch) == (0.25, 2)
    assert str(direct) == "patch=2,strategy=exact"
    with pytest.raises(PlanError, match="structure"):
        high_res_preset(2, "overlp=0.25")


def test_an_uploaded_image_is_generated_again_larger(queue: JobQueue) -> None:
    runner = make_runner(more=("image", "strength"))
    request = UpscaleRequest(
        image=Image.new("RGB", (50, 30)), generate=replace(REQUEST, steps=8), scale=2.0, strength=0.5
    )
    view = over(queue.submit("A", "high-res", lambda job: upscale_image(runner, job, request)))
    assert view.state == "done", view.error
    assert view.result.generated.image.size == view.result.baseline.size == (100, 60)
    pipe: Any = runner.workers.upscaler()
    (call,) = pipe.calls
    assert call["image"].size == (128, 64)  # continued to what any model can generate
    assert (call["prompt"], call["strength"], call["num_inference_steps"]) == ("a fox", 0.5, 8)
    assert call["generator"].initial_seed() == 5
    assert "height" not in call
    assert (pipe.tracing, pipe.on_step) == (False, None)


def test_generating_it_again_is_cancelled_between_two_steps(queue: JobQueue) -> None:
    runner = make_runner(more=("image", "strength"))
    pipe: Any = runner.workers.upscaler()
    pipe.go.clear()
    request = UpscaleRequest(image=Image.new("RGB", (50, 30)), generate=REQUEST)
    job = queue.submit("A", "high-res", lambda job: upscale_image(runner, job, request))
    until(lambda: pipe.calls, "the call")
    queue.cancel("A")
    pipe.go.set()
    assert over(job).state == "cancelled"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 1.0}, "scale 1: it is more than 1 and at most 8"),
        ({"scale": 9.0}, "scale 9"),
        ({"strength": 1.0}, "strength 1: it is a number from 0.05 to 0.95"),
        ({"strength": 0.2}, "3 steps, of which strength 0.2 leaves none: use more of either"),
        ({"image": Image.new("L", (2048, 2048)), "scale": 3.0}, "6144 x 6144 pixels.*: use a scale of at most 2"),
        ({"image": Image.new("L", (5000, 5000))}, "10000 x 10000 pixels.*: use a smaller image"),
    ],
)
def test_what_cannot_be_generated_larger_is_reported_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        UpscaleRequest(**{"image": Image.new("RGB", (50, 30)), "generate": REQUEST, **options})


def test_a_model_that_generates_no_images_is_a_sentence() -> None:
    with pytest.raises(PlanError, match="returns dict, which has no images"):
        image_of({})


def test_exact_values_are_kept_beside_the_image(queue: JobQueue) -> None:
    runner = make_runner()
    job = queue.submit(
        "A", "image", lambda job: runner.generate(job, REQUEST, presets_for(2)[0], RunOptions(exact=True))
    )
    found = over(job).result
    assert found.values.shape == (64, 64, 3)
    assert found.image.size == (64, 64)


def test_words_that_the_embedded_model_does_not_know_come_with_the_image(queue: JobQueue) -> None:
    runner = make_runner()
    request = replace(REQUEST, prompt="a red house and a <fox>, green hills")
    found: JobImage = over(
        queue.submit("A", "image", lambda job: runner.generate(job, request, presets_for(2)[0]))
    ).result
    assert found.unknown == ("fox",)
    assert "Not understood</dt><dd>fox:" in facts(found.run, found.why, found.unknown)
    assert "Not understood" not in facts(found.run, found.why)
