"""Previews by the pipeline's own decoder: of the last latents they are the finished image, and they disturb nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import nn

from patchpar import ParallelPipeline, Plan, PlanError
from patchpar.pipeline.decoded_preview import PreviewDecoder, with_estimate
from patchpar.pipeline.messages import Previews
from tests.pipeline.conftest import QUICK, generator
from tests.pipeline.test_suspend import cut, recorded
from tests.tiny import Tiny, build

SECONDS = 120.0
STEPS = 3
DAILY = ("sd", "sdxl", "flux", "sd3")
ELSE = (
    "sd_img2img", "sd_inpaint", "sd_inpaint_4", "sd_controlnet", "sdxl_img2img", "sdxl_inpaint", "sdxl_controlnet",
    "instruct_pix2pix", "pixart", "auraflow", "hidream", "zimage", "chroma", "qwen", "qwen_edit", "lumina2", "cogview4",
    "flux2", "flux_controlnet_img2img", "sd_t2i", "sdxl_t2i_multi", "sd_ip_masks",
)  # fmt: skip
CPU = torch.device("cpu")


def arguments_of(tiny: Tiny, **changes: Any) -> dict[str, Any]:
    return {**tiny.call_kwargs, "num_inference_steps": STEPS, "output_type": "pil", **changes, "generator": generator()}


@contextmanager
def stepping(scheduler: Any, after: Any) -> Iterator[None]:
    """Call `after(result)` after each step."""
    step = scheduler.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        after(result)
        return result

    scheduler.step = stepped
    try:
        yield
    finally:
        del scheduler.step


@contextmanager
def counted(pipe: Any) -> Iterator[Counter[str]]:
    """Count calls of the networks of a pipeline but its VAE."""
    found: Counter[str] = Counter()
    hooks = [
        network.register_forward_pre_hook(lambda *_, name=name: found.update([name]))
        for name, network in pipe.components.items()
        if isinstance(network, nn.Module) and name != "vae"
    ]
    yield found
    for hook in hooks:
        hook.remove()


def pixels(image: Any) -> Any:
    return np.asarray(image, np.int16)


def previewed(tiny: Tiny) -> tuple[list[Any], Any, Counter[str]]:
    """Images of the latents of each step, and of these in a wrong scale; the finished one; calls of networks."""
    arguments = arguments_of(tiny)
    decoder = PreviewDecoder(tiny.pipe, Plan(), CPU)
    found: list[Any] = []
    scheduler = tiny.pipe.scheduler

    def after(result: Any) -> None:
        found.append([decoder.image(scheduler, result, result[0] * scale) for scale in (1.0, 2.0)])

    with counted(tiny.pipe) as calls, decoder.watching(arguments), stepping(scheduler, after):
        output = tiny.pipe(**arguments)
    return found, output.images[0], calls


@pytest.mark.parametrize("name", [*DAILY, *(pytest.param(name, marks=pytest.mark.breadth) for name in ELSE)])
def test_of_the_last_latents_it_is_the_finished_image(name: str) -> None:
    """Bit for bit, and that image is the one without previews; neither denoiser nor encoders compute anything again.

    Controls: latents of another step, or of another scale, are another image.
    """
    tiny = build(name)
    with counted(tiny.pipe) as plain_calls:
        plain = tiny.pipe(**arguments_of(tiny)).images[0]
    found, finished, calls = previewed(tiny)
    assert np.array_equal(pixels(finished), pixels(plain))
    right, wrong = found[-1]
    assert np.array_equal(pixels(right), pixels(finished))
    assert np.abs(pixels(wrong) - pixels(finished)).max() > 1
    assert len(found) >= STEPS - 1
    assert not np.array_equal(pixels(found[0][0]), pixels(finished))
    assert calls == plain_calls


def previews_of(pipe: ParallelPipeline, plan: str, count: int = 2) -> tuple[list[tuple[int, int, Any]], Any]:
    found: list[tuple[int, int, Any]] = []
    previews = Previews(count=count, receive=lambda *each: found.append(each), decoded=True)
    arguments = {**QUICK, "num_inference_steps": 4}
    job = pipe.submit(**arguments, generator=generator(), plan=plan, previews=previews)
    return found, job.result(SECONDS).images[0]


@pytest.mark.parametrize("plan", ["patch=2", pytest.param("cfg=2", marks=pytest.mark.breadth)])
def test_ranks_decode_them_together(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    """Those of one process to the rounding of 8 bits; the finished image is that of the same plan without them."""
    with ParallelPipeline(plain, devices="cpu") as alone:
        want, _ = previews_of(alone, "cfg=1")
    found, image = previews_of(parallel, plan)
    assert [(step, steps) for step, steps, _ in found] == [(1, 4), (2, 4)]
    for (_, _, one), (_, _, other) in zip(found, want, strict=True):
        assert np.abs(pixels(one) - pixels(other)).max() <= 1
    without = parallel.submit(**{**QUICK, "num_inference_steps": 4}, generator=generator(), plan=plan)
    assert np.array_equal(pixels(image), pixels(without.result(SECONDS).images[0]))


@pytest.mark.breadth
@pytest.mark.parametrize("strategy", ["fresh-edges", "displaced"])
def test_messages_on_their_way_are_not_disturbed(parallel: ParallelPipeline, strategy: str) -> None:
    """With stale values, messages of one step arrive in the next, and the image is decoded between them."""
    plan = f"patch=2,strategy={strategy}"
    found, image = previews_of(parallel, plan)
    assert len(found) == 2
    without = parallel.submit(**{**QUICK, "num_inference_steps": 4}, generator=generator(), plan=plan)
    assert np.array_equal(pixels(image), pixels(without.result(SECONDS).images[0]))


@pytest.mark.breadth
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_lost_between_them(four: ParallelPipeline, rank: int) -> None:
    """The others go on with the call and with its previews, of which none is missing."""
    call = {**QUICK, "num_inference_steps": 8}
    four.submit(**call, plan="patch=2").result(SECONDS)
    whole = four.submit(**call, plan="patch=2", generator=generator()).result(SECONDS).images[0]
    steps: list[int] = []

    def receive(step: int, *_: Any) -> None:
        steps.append(step)
        if len(steps) == 2:
            os.kill(four._executor.pids[rank], signal.SIGKILL)

    previews = Previews(count=7, receive=receive, decoded=True)
    job = four.submit(**call, plan="patch=2", ranks=(0, 1), generator=generator(), previews=previews)
    assert np.abs(pixels(job.result(SECONDS).images[0]) - pixels(whole)).max() <= 1
    assert job.retries == 1
    assert set(steps) == set(range(1, 8))


def test_a_call_without_images_is_refused_in_words() -> None:
    with pytest.raises(PlanError, match="WanPipeline makes no images of its scheduler's latents: use previews of the"):
        previewed(build("wan"))


def test_what_fails_in_its_code_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pipeline that does not end as others do."""
    tiny = build("sd")
    monkeypatch.setattr(PreviewDecoder, "_ended", lambda *_: [][1])
    with pytest.raises(PlanError, match=r"StableDiffusionPipeline cannot be ended early \(IndexError"):
        previewed(tiny)


def test_what_has_been_sent_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that goes on where another was begins to decode behind the recorded calls."""
    made: list[int] = []
    monkeypatch.setattr(PreviewDecoder, "image", lambda self, *_: made.append(1))
    tiny = build("sd")
    with ParallelPipeline(tiny.pipe, devices="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        _, suspended = recorded(pipe, **arguments_of(tiny, num_inference_steps=4))
        previews = Previews(count=3, receive=lambda *_: None, decoded=True)
        resume = cut(suspended, 2)
        job = pipe.submit(**arguments_of(tiny, num_inference_steps=4), previews=previews, resume=resume)
        job.result(SECONDS)
    assert len(made) == 2, "steps 2 and 3: the calls of step 1 and 2 are recorded, and 2 may not have been sent"


def test_pipelines_that_are_refused_before_they_begin() -> None:
    tiny = build("sd")
    structure = Plan(patch=2, strategy="structure")
    with pytest.raises(PlanError, match="latents of its own"):
        PreviewDecoder(tiny.pipe, structure, CPU)
    tiny.pipe.unet._compiled_call_impl = len
    with pytest.raises(PlanError, match="unet of StableDiffusionPipeline is compiled"):
        PreviewDecoder(tiny.pipe, Plan(), CPU)
    with pytest.raises(PlanError, match="changes its denoiser"):
        PreviewDecoder(SimpleNamespace(scheduler=tiny.pipe.scheduler, _set_pag_attn_processor=len), Plan(), CPU)
    with pytest.raises(PlanError, match="has no scheduler"):
        PreviewDecoder(object(), Plan(), CPU)


def test_the_result_of_a_step_with_an_estimate() -> None:
    """Of either form; what has another shape stays."""
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(4)
    sample, estimate = torch.zeros(1, 4, 8, 8, dtype=torch.bfloat16), torch.ones(1, 4, 8, 8)
    result = scheduler.step(sample, scheduler.timesteps[0], sample)
    for found in (with_estimate(result, estimate), with_estimate((sample, sample, 3), estimate)):
        assert all(torch.equal(found[number], estimate.to(torch.bfloat16)) for number in (0, 1))
    assert with_estimate((sample, 3, sample[:, :1]), estimate)[1] == 3
