"""A job draws in the way that was chosen, shows every step, ends between two steps, and keeps what the run says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from app.comparison import compare
from app.drawing import ImageJobRunner, JobImage, RunOptions, picture_of
from app.jobs import Cancelled, JobQueue
from app.large import UpscaleRequest, draw_again, draw_large, large_way
from app.orders import GenerateRequest
from app.ways import way_named, ways_for
from patchpar import Plan, PlanError, StructureGuidance

from .fakes import FakePipeline, FakeWorkers
from .waiting import over, until

ORDER = GenerateRequest(prompt="a fox", steps=3, seed=5)
WAYS = {way.label: way for way in ways_for(2)}


def artist(**options: Any) -> ImageJobRunner:
    return ImageJobRunner(FakeWorkers(FakePipeline(**options)))  # type: ignore[arg-type]


def test_a_picture_comes_with_its_run_and_its_steps(desk: JobQueue) -> None:
    drawer = artist()
    seen = []
    job = desk.submit("A", "image", lambda job: drawer.draw(job, ORDER, ways_for(2)[0]))
    view = over(job)
    seen.append(view)
    assert (view.state, view.step, view.steps, view.note) == ("done", 3, 3, "drawing")
    found: JobImage = view.result
    assert found.image.size == (64, 64)
    assert found.run.seconds == 0.5
    assert found.values is None
    pipe: Any = drawer.workers.pictures()
    (call,) = pipe.calls
    assert call["prompt"] == "a fox"
    assert call["generator"].initial_seed() == 5
    assert (pipe.tracing, pipe.on_step) == (False, None)  # left as they were


@pytest.mark.parametrize(
    ("label", "plan"),
    [
        ("Automatic, 2 devices", "auto"),
        ("One device", "restored"),
        ("Guidance branches", Plan(cfg=2)),
        ("2 bands, exact", None),
    ],
)
def test_the_way_is_the_plan(desk: JobQueue, label: str, plan: Any) -> None:
    drawer = artist()
    over(desk.submit("A", "image", lambda job: drawer.draw(job, ORDER, way_named(label, 2))))
    pipe: Any = drawer.workers.pictures()
    (set_to,) = pipe.plans
    if plan is None:
        assert str(set_to) == "patch=2,strategy=exact"
    else:
        assert str(set_to) == str(plan) or set_to.cfg == plan.cfg


def test_previews_come_as_soon_as_one_picture_has_been_drawn(desk: JobQueue) -> None:
    drawer = artist()
    over(desk.submit("", "prepare", drawer.prepare))
    pipe: Any = drawer.workers.pictures()
    pipe.go.clear()
    job = desk.submit("A", "image", lambda job: drawer.draw(job, ORDER, ways_for(2)[0]))
    until(lambda: job.view.state == "running", "the job to begin")
    pipe.go.set()
    previews = set()
    until(lambda: previews.add(job.view.preview is not None) or job.view.is_over, "the end")
    assert drawer.colours.show(__import__("numpy").zeros((4, 16, 16))) is not None
    assert job.view.preview is None  # the picture itself is there


@pytest.mark.parametrize("has_callback", [True, False])
def test_cancelling_ends_it_between_two_steps(desk: JobQueue, has_callback: bool) -> None:
    drawer = artist(has_callback=has_callback)
    pipe: Any = drawer.workers.pictures()
    pipe.go.clear()
    job = desk.submit("A", "image", lambda job: drawer.draw(job, ORDER, ways_for(2)[0]))
    until(lambda: pipe.calls, "the call")
    desk.cancel("A")
    pipe.go.set()
    assert over(job).state == "cancelled"
    assert over(desk.submit("A", "image", lambda job: drawer.draw(job, ORDER, ways_for(2)[0]))).state == "done"


def test_a_pipeline_with_callbacks_is_never_left_in_the_middle() -> None:
    """An exception out of on_step would cost the workers; out of the callback it does not."""
    drawer = artist()
    pipe: Any = drawer.workers.pictures()

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
        drawer.draw(Unwanted(), ORDER, ways_for(2)[0])  # type: ignore[arg-type]
    assert raised == []


def test_two_ways_are_compared_on_exact_values(desk: JobQueue) -> None:
    drawer = artist()
    ways = (WAYS["2 bands, exact"], WAYS["One device"])
    found = over(desk.submit("A", "compare", lambda job: compare(drawer, job, ORDER, ways))).result
    assert found.largest == pytest.approx(0.01, abs=1e-6)
    assert found.psnr_db == pytest.approx(40, abs=0.1)
    assert "PSNR 40.0 dB" in found.verdict
    assert [row[0] for row in found.rows(("left", "right"))] == ["left", "right"]
    pipe: Any = drawer.workers.pictures()
    assert [call["num_inference_steps"] for call in pipe.calls] == [2, 3, 2, 3]  # each warmed up before it is timed
    same = over(desk.submit("A", "compare", lambda job: compare(drawer, job, ORDER, (ways[0], ways[0])))).result
    assert same.verdict == "The pictures are equal, to the last bit."


def test_large_pictures_are_led_by_structure_guidance(desk: JobQueue) -> None:
    drawer, way = artist(), large_way(2, "overlap=0.25")
    found = over(desk.submit("A", "large", lambda job: draw_large(drawer, job, ORDER, way, beside=True))).result
    assert found.beside is not None
    pipe: Any = drawer.workers.pictures()
    guided, direct = pipe.plans
    assert isinstance(guided.strategy, StructureGuidance)
    assert (guided.strategy.overlap, guided.patch) == (0.25, 2)
    assert str(direct) == "patch=2,strategy=exact"
    with pytest.raises(PlanError, match="asg"):
        large_way(2, "overlp=0.25")


def test_an_uploaded_picture_is_drawn_again_larger(desk: JobQueue) -> None:
    drawer = artist(more=("image", "strength"))
    wanted = UpscaleRequest(picture=Image.new("RGB", (50, 30)), order=replace(ORDER, steps=8), scale=2.0, strength=0.5)
    view = over(desk.submit("A", "large", lambda job: draw_again(drawer, job, wanted)))
    assert view.state == "done", view.error
    assert view.result.drawn.image.size == view.result.beside.size == (100, 60)
    pipe: Any = drawer.workers.enlarging()
    (call,) = pipe.calls
    assert call["image"].size == (128, 64)  # continued to what any model can draw
    assert (call["prompt"], call["strength"], call["num_inference_steps"]) == ("a fox", 0.5, 8)
    assert call["generator"].initial_seed() == 5
    assert "height" not in call
    assert (pipe.tracing, pipe.on_step) == (False, None)


def test_drawing_it_again_is_cancelled_between_two_steps(desk: JobQueue) -> None:
    drawer = artist(more=("image", "strength"))
    pipe: Any = drawer.workers.enlarging()
    pipe.go.clear()
    wanted = UpscaleRequest(picture=Image.new("RGB", (50, 30)), order=ORDER)
    job = desk.submit("A", "large", lambda job: draw_again(drawer, job, wanted))
    until(lambda: pipe.calls, "the call")
    desk.cancel("A")
    pipe.go.set()
    assert over(job).state == "cancelled"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"scale": 1.0}, "scale 1: it is more than 1 and at most 8"),
        ({"scale": 9.0}, "scale 9"),
        ({"strength": 1.0}, "strength 1: it is a number from 0.05 to 0.95"),
        ({"strength": 0.2}, "3 steps, of which strength 0.2 leaves none: use more of either"),
        ({"picture": Image.new("L", (2048, 2048)), "scale": 3.0}, "6144 x 6144 pixels.*: use a scale of at most 2"),
        ({"picture": Image.new("L", (5000, 5000))}, "10000 x 10000 pixels.*: use a smaller picture"),
    ],
)
def test_what_cannot_be_drawn_larger_is_told_at_once(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        UpscaleRequest(**{"picture": Image.new("RGB", (50, 30)), "order": ORDER, **wanted})


def test_a_model_that_draws_no_pictures_is_a_sentence() -> None:
    with pytest.raises(PlanError, match="returns dict, which has no pictures"):
        picture_of({})


def test_exact_values_are_kept_beside_the_picture(desk: JobQueue) -> None:
    drawer = artist()
    job = desk.submit("A", "image", lambda job: drawer.draw(job, ORDER, ways_for(2)[0], RunOptions(exact=True)))
    found = over(job).result
    assert found.values.shape == (64, 64, 3)
    assert found.image.size == (64, 64)
