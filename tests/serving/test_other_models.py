"""Models other than the embedded one: what their classes and schedulers cannot do is refused, and never a failure."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from diffusers import StableDiffusionImageVariationPipeline

from patchpar import ParallelPipeline, PlanError
from patchpar.models.refused_calls import refusal_by_diffusers
from patchpar.models.task import purpose_of
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.served_task import check_task
from patchpar.serving.service import ImageService
from patchpar.serving.settings import RequestLimits, ServedModel, ServerSettings
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import error_of
from tests.serving.test_uploads import png
from tests.tiny import build, encoders

MANY = 99_999
"""More steps than schedulers with a table of 1000 take."""
SMALL = {"prompt": "a fox", "size": "64x64", "num_inference_steps": 2}
LIMITS = RequestLimits(steps=MANY)


@contextmanager
def served(model: Any) -> Iterator[Any]:
    """A client of a server of a tiny pipeline, by name or itself, on one device in this process."""
    with ParallelPipeline(build(model).pipe if isinstance(model, str) else model, devices="cpu") as pipe:
        generator = ImageGenerator(ServedModel(model="tiny", devices=("cpu",)))
        generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
        generator.warm_up = lambda job: setattr(generator, "_is_warm", True)  # type: ignore[method-assign]
        service = ImageService(generator, ServerSettings(port=0, limits=LIMITS))
        service.load()
        try:
            yield client_of(application(service))
        finally:
            service.close()


@pytest.fixture(scope="module")
def sd() -> Iterator[Any]:
    with served("sd") as client:
        yield client


def test_steps_that_the_scheduler_refuses(sd: Any) -> None:
    """In one sentence with the way out, wherever the request comes from; the server goes on."""
    many = {**SMALL, "num_inference_steps": MANY}
    error = error_of(sd.post(PATH, json=many), 400)
    assert (error["param"], error["code"]) == ("num_inference_steps", "invalid_value")
    assert error["message"].startswith(f"num_inference_steps={MANY}: DDIMScheduler, the scheduler of this model")
    assert error["message"].endswith("1000 timesteps): use another number")
    events = sd.post(PATH, json={**many, "stream": True}).text
    assert json.loads(events.partition("data: ")[2].partition("\n")[0])["error"] == error
    job = f"/v1/jobs/{sd.post(f'{PATH}?async=true', json=many).json()['id']}"
    until(lambda: sd.get(job).json()["status"] == "failed", "the job")
    assert sd.get(job).json()["error"]["message"] == error["message"]
    assert sd.post(PATH, json=SMALL).status_code == 200


def test_a_video_of_steps_that_the_scheduler_refuses() -> None:
    with served("text_to_video") as client:
        made = client.post("/v1/videos", json={**SMALL, "num_frames": 4, "num_inference_steps": MANY}).json()
        video = f"/v1/videos/{made['id']}"
        until(lambda: client.get(video).json()["status"] == "failed", "the video")
        error = client.get(video).json()["error"]
        assert error["code"] == "invalid_value"
        assert f"num_inference_steps={MANY}: DDIMScheduler" in error["message"]


@pytest.mark.parametrize(
    ("name", "fields", "param", "text"),
    [
        ("ltx", {"size": "72x64", "num_frames": 5}, "size", "`height` and `width` have to be divisible by 32"),
        ("sd3", {"size": "64x400"}, "size", "Height (25) cannot be greater than `pos_embed_max_size`: 24"),
    ],
)
def test_what_diffusers_refuses(name: str, fields: dict[str, Any], param: str, text: str) -> None:
    """By a check that no description of the model has: of its pipeline, or of its network."""
    with served(name) as client:
        path = "/v1/videos/sync" if "num_frames" in fields else PATH
        error = error_of(client.post(path, json={**SMALL, **fields}), 400)
        assert (error["code"], error["param"]) == ("invalid_value", param)
        assert text in error["message"]


def test_a_strength_that_leaves_no_step_is_named() -> None:
    with served("sd_img2img") as client:
        form, files = {"prompt": "a fox", "strength": "0.01"}, {"image": ("a.png", png((64, 64)), "image/png")}
        error = error_of(client.post("/v1/images/edits", data=form, files=files), 400)
        assert error["param"] == "strength"
        assert "no denoising step is left" in error["message"]


def edited(client: Any, images: int) -> Any:
    files = [("image[]", ("a.png", png((64, 64)), "image/png"))] * images
    return client.post("/v1/images/edits", data={"prompt": "a fox", "num_inference_steps": "2"}, files=files)


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("instruct_pix2pix", "unsupported_parameter", "2 images: the call of this model failed with RuntimeError"),
        ("sd_controlnet", "invalid_value", "image batch size must be same as prompt batch size"),
    ],
)
def test_two_images_for_a_model_that_takes_one(name: str, code: str, text: str) -> None:
    """Whoever refuses them; the field is named, and the server goes on."""
    with served(name) as client:
        error = error_of(edited(client, 2), 400)
        assert (error["param"], error["code"]) == ("image", code)
        assert text in error["message"]
        assert edited(client, 1).status_code == 200


def test_a_model_that_makes_an_image_of_each() -> None:
    """The second one would be made in vain, without a word."""
    parts = {name: part for name, part in build("sd").pipe.components.items() if "text" not in name}
    known = inspect.signature(StableDiffusionImageVariationPipeline).parameters
    parts |= {"image_encoder": encoders.clip_vision(), "feature_extractor": encoders.clip_image_processor()}
    pipe = StableDiffusionImageVariationPipeline(
        **{name: parts.get(name) for name in known if name != "requires_safety_checker"}, requires_safety_checker=False
    )
    with served(pipe) as client:
        error = error_of(edited(client, 2), 400)
        assert (error["param"], error["code"]) == ("image", "unsupported_parameter")
        assert "StableDiffusionImageVariationPipelineOutput" not in error["message"]
        assert "an image of each of the 2" in error["message"]
        assert edited(client, 1).status_code == 200


def test_what_a_network_fails_with_is_named_by_its_class() -> None:
    """No check knows the range of an argument: the client gets the exception's class, and not to repeat it."""
    with served("auraflow") as client:
        response = client.post(PATH, json={**SMALL, "size": "64x512"})
        assert error_of(response, 500)["message"].startswith("generation failed with IndexError; the server's log")
        assert response.headers["x-should-retry"] == "false"
        assert client.post(PATH, json=SMALL).status_code == 200


def test_diffusers_refuses_on_workers_too() -> None:
    with (
        ParallelPipeline(build("ltx").pipe, devices="cpu:2", plan="patch=2") as pipe,
        pytest.raises(ValueError, match="divisible by 32") as raised,
    ):
        pipe("a fox", height=64, width=72, num_frames=5, num_inference_steps=2)
    assert isinstance(raised.value, ValueError)
    assert refusal_by_diffusers(raised.value) == str(raised.value)
    assert refusal_by_diffusers(ValueError(str(raised.value))) == "", "control: the same text from anywhere else"


def test_a_model_without_a_prompt_ignores_it_and_says_so() -> None:
    """OpenAI's clients cannot leave it out. Without a size it is the model's own, below 64 pixels too."""
    with served("ddpm") as client:
        response = client.post(PATH, json={"prompt": "a fox", "num_inference_steps": 2, "seed": 1})
        assert response.status_code == 200, response.text
        assert response.json()["size"] == "32x32"
        assert "prompt is ignored" in response.headers["Warning"]
    with served("svd") as client:
        form = {name: str(value) for name, value in {**SMALL, "num_frames": 5}.items()}
        files = {"input_reference": ("a.png", png((64, 64)), "image/png")}
        assert client.post("/v1/videos/sync", data=form, files=files).status_code == 200
        assert "prompt is ignored" in client.post("/v1/videos", data=form, files=files).headers["Warning"]


def test_a_model_that_needs_more_than_requests_have_is_not_loaded() -> None:
    for kind, needed in (("DiT", "class_labels"), ("FluxControl", "control_image")):
        with pytest.raises(
            PlanError, match=f"{kind}Pipeline, whose call needs {needed}, which `patchpar serve` does not"
        ):
            check_task(purpose_of(f"{kind}Pipeline"))
    for kind in ("Flux", "StableVideoDiffusion", "StableDiffusionInpaint", "WanImageToVideo", "DDPM"):
        check_task(purpose_of(f"{kind}Pipeline"))


def test_another_error_of_a_call_stays_a_failure(sd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the scheduler would refuse the steps, and another part of the call has failed."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("boom")

    monkeypatch.setattr(ImageGenerator, "generate", fails)
    assert error_of(sd.post(PATH, json={**SMALL, "num_inference_steps": MANY}), 500)["code"] == "failed"
