"""Fields begin with what the loaded model has as its own, and what a person has changed is left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from diffusers import (
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
)

from app.defaults import Defaults, defaults_before, defaults_of
from app.fields import GUIDANCE, Forms, image_fields
from app.image_runner import own_arguments
from app.image_stream import StreamSummary
from app.image_tab import ImageTab
from app.job_queue import JobView
from app.page import build
from app.plan_tab import PlanTab
from app.presets import CUSTOM, CUSTOM_MEANING
from app.state import AppState
from app.stream_tab import show
from app.workers import AppConfig
from patchpar.models.few_steps import few_steps_of
from patchpar.models.info import PipelineInfo, describe
from patchpar.models.loading import load_pipeline
from tests import tiny
from tests.breadth import first_of

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers
from .test_bad_input import AUTOMATIC, OWNER, fields, message_of


class LoadedWorkers(FakeWorkers):
    """A model of the hub, which has been loaded, or not yet."""

    def __init__(self, model: str, description: PipelineInfo | None) -> None:
        super().__init__(FakePipeline())
        self.setup, self.loaded = AppConfig(model=model), description

    @property
    def model(self) -> Any:
        return self.loaded


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    app_states: list[AppState] = []

    def open_state(model: str, description: PipelineInfo | None = None) -> AppState:
        app_states.append(state_of(LoadedWorkers(model, description)))
        monkeypatch.setenv("GRADIO_TEMP_DIR", str(app_states[-1].uploads))
        return app_states[-1]

    yield open_state
    for each in app_states:
        each.close()


@pytest.mark.parametrize(("kind", "steps", "guidance"), [("sd", 50, 7.5), ("sdxl", 50, 5.0), ("flux", 28, 3.5)])
def test_they_are_those_of_the_pipeline_s_call_and_of_its_size(kind: str, steps: int, guidance: float) -> None:
    model = describe(tiny.build(kind).pipe)
    found = defaults_of("org/name", model)
    assert (found.steps, found.guidance) == (steps, guidance)
    assert model.default_size is not None
    assert (found.height, found.width) == tuple(max(64, side) for side in model.default_size)


TRAILING = {"timestep_spacing": "trailing"}
ZERO_SNR = {**TRAILING, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
SHIFTED = {"use_dynamic_shifting": True}
UNGUIDED = {"guidance_embeds": False}
DISTILLED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sd-turbo": ("sd", EulerDiscreteScheduler(**TRAILING), {}),
    "sdxl-turbo": ("sdxl", EulerAncestralDiscreteScheduler(**TRAILING), {}),
    "LCM-LoRA": ("sd", LCMScheduler(), {}),
    "FLUX.1-schnell": ("flux", FlowMatchEulerDiscreteScheduler(), UNGUIDED),
}
OTHERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "timesteps from the beginning": ("sdxl", EulerDiscreteScheduler(timestep_spacing="leading"), {}),
    "zero terminal SNR": ("sd", EulerDiscreteScheduler(**ZERO_SNR), {}),
    "another scheduler": ("sd", DDIMScheduler(**TRAILING), {}),
    "FLUX.1-dev": ("flux", FlowMatchEulerDiscreteScheduler(**SHIFTED), {}),
    "shifted by size": ("flux", FlowMatchEulerDiscreteScheduler(**SHIFTED), UNGUIDED),
}


def description_of(model: tuple[str, Any, dict[str, Any]], folder: Path) -> PipelineInfo:
    """Of a tiny pipeline with this scheduler, and these values in the configuration of its denoiser, from a folder."""
    kind, scheduler, config = model
    pipe = tiny.build(kind).pipe
    pipe.scheduler = scheduler
    pipe.save_pretrained(folder)
    for file in folder.glob("transformer/config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return describe(load_pipeline(str(folder), {}))


@pytest.mark.parametrize("name", first_of(DISTILLED, "sd-turbo", "FLUX.1-schnell"))
def test_models_that_are_distilled_have_few_steps_and_no_guidance(name: str, tmp_path: Path) -> None:
    model = description_of(DISTILLED[name], tmp_path)
    found = defaults_of("org/name", model)
    assert (found.steps, found.guidance) == (4, 0.0)
    assert own_arguments(model) == ({"max_sequence_length": 256} if name == "FLUX.1-schnell" else {})


@pytest.mark.parametrize("name", first_of(OTHERS, "zero terminal SNR", "shifted by size"))
def test_others_have_those_of_their_class(name: str, tmp_path: Path) -> None:
    model = description_of(OTHERS[name], tmp_path)
    found = defaults_of("org/name", model)
    parameters = model.parameters
    assert (found.steps, found.guidance) == (parameters["num_inference_steps"], parameters["guidance_scale"])
    assert found.steps > 20
    assert own_arguments(model) == {}


def test_what_a_model_says_of_itself_counts() -> None:
    for kind, few in (("Flux2KleinPipeline", (4, 1.0)), ("Krea2Pipeline", (8, 0.0))):
        for is_distilled in (True, False):
            pipe = type(kind, (), {"config": {"is_distilled": is_distilled}, "scheduler": None})()
            found = few_steps_of(pipe, {})
            assert (found and (found.steps, found.guidance)) == (few if is_distilled else None)


NAMED = {
    ("StableDiffusion3Pipeline", "stabilityai/stable-diffusion-3.5-large-turbo"): (4, 0.0),
    ("StableDiffusion3Img2ImgPipeline", "/models/SD3.5_Turbo/"): (4, 0.0),
    ("StableDiffusion3Pipeline", "stabilityai/stable-diffusion-3.5-large"): None,
    ("ZImagePipeline", "/cache/models--Tongyi-MAI--Z-Image-Turbo/snapshots/0123456789abcdef"): (8, 0.0),
    ("ZImagePipeline", "Tongyi-MAI/Z-Image"): None,
    ("ZImagePipeline", "turbo/Z-Image"): None,
    ("ZImagePipeline", "someone/Z-Image-De-Turbo"): None,
    ("StableDiffusionXLPipeline", "someone/sdxl-lightning"): (4, 0.0),
    ("StableDiffusionXLPipeline", "someone/SDXL_Lightning_8step"): (8, 0.0),
    ("StableDiffusionXLPipeline", "someone/hyper-sdxl"): None,
    ("FluxPipeline", "someone/FLUX.1-schnell-fp8"): (4, 0.0),
    ("FluxPipeline", "someone/FLUX.1-lite"): None,
}


@pytest.mark.parametrize(("kind", "path"), NAMED)
def test_a_name_counts_where_the_configuration_says_nothing(kind: str, path: str) -> None:
    """Of the repository, which may be in the hub's cache, or of the folder; not of its owner."""
    pipe = type(kind, (), {"config": {"_name_or_path": path}, "scheduler": None})()
    found = few_steps_of(pipe, {"guidance_embeds": False})
    assert (found and (found.steps, found.guidance)) == NAMED[kind, path]


def test_the_name_is_that_of_the_folder_it_was_loaded_from(tmp_path: Path) -> None:
    for name, few in (("sd3.5-turbo", (4, 0.0)), ("sd3.5", None)):
        pipe = tiny.build("sd3").pipe
        pipe.save_pretrained(tmp_path / name)
        found = describe(load_pipeline(str(tmp_path / name), {})).few_steps
        assert (found and (found.steps, found.guidance)) == few


def test_the_embedded_models_have_theirs_whatever_their_class_says() -> None:
    known = Defaults(height=256, width=256, steps=20, guidance=4.0)
    assert defaults_before("embedded") == defaults_of("embedded-dit", describe(tiny.build("sdxl").pipe)) == known
    assert defaults_of("org/name", None) == Defaults()


def test_a_field_that_a_person_has_changed_keeps_what_it_holds() -> None:
    forms = Forms(Defaults())
    with gr.Blocks():
        image_fields(forms, times=2, max_steps=8)
    names = [each.label for each in forms.components]
    assert names == ["Width", "Height", "Steps", GUIDANCE]
    values: list[Any] = [each.value for each in forms.components]
    assert values == [2048, 2048, 8, 4.0]
    known = Defaults(height=512, width=768, steps=4, guidance=0.0)
    filled = [each["value"] for each in forms.filled(known, values)]
    assert filled == [1536, 1024, 4, 0.0]
    filled = [each["value"] for each in forms.filled(known, [640, 2048, 8, 9.5])]
    assert filled == [640, 1024, 4, 9.5]
    for each, value in zip(forms.filled(known, values), (1536, 1024), strict=False):
        assert each["minimum"] <= value <= each["maximum"]
        assert (value - each["minimum"]) % each["step"] == 0
    assert forms.filled(Defaults(), values) == [gr.skip()] * 4


def test_the_page_is_filled_when_the_model_has_been_loaded(opened: Any) -> None:
    model = describe(tiny.build("flux").pipe)
    page = build(opened("org/name", model))
    (fill,) = (each for each in page.fns.values() if getattr(each.fn, "__name__", "") == "fill")
    values = [component.value for component in fill.inputs]
    filled = fill.fn(*values)
    assert [each["value"] for each in filled if each["value"] == 3.5]
    assert len(filled) == len(fill.outputs) == 4 * 4 + 2 + 3 + 1  # three of the tab Edit, steps of the tab Plan


def test_only_the_embedded_model_is_reported_to_generate_what_it_generates(opened: Any) -> None:
    for model, is_stated in (("embedded", True), ("org/name", False)):
        config = str(build(opened(model)).get_config_file())
        assert ("Prompts of the embedded model" in config) == is_stated


def test_the_list_says_when_a_plan_of_one_s_own_is_what_generates(opened: Any) -> None:
    tab = ImageTab(opened("embedded"))
    line, meaning = tab.write("patch=2", "displaced")
    assert (line["value"], CUSTOM_MEANING in meaning) == (CUSTOM, True)
    line, meaning = tab.write(" ", "")
    assert (line["value"], "never approximate" in meaning) == (AUTOMATIC, True)
    assert tab.choose(AUTOMATIC)[1:] == ("", "")  # what was written no longer counts, and is no longer there
    assert CUSTOM_MEANING in tab.choose(CUSTOM)[0]
    assert "the custom plan is empty: fill it in" in message_of(
        tab.generate(OWNER, CUSTOM, "", " ", True, 1, *fields())
    )


def test_what_is_chosen_is_what_generates(opened: Any) -> None:
    state = opened("embedded")
    asyncio.run(_to_the_end(ImageTab(state).generate(OWNER, CUSTOM, "patch=2", "displaced", True, 1, *fields())))
    assert str(state.workers.image_pipeline().plan) == "patch=2,strategy=displaced"


async def _to_the_end(displayed: Any) -> None:
    async for _ in displayed:
        pass


def test_a_stream_that_is_stopped_before_its_first_image_has_made_nothing() -> None:
    none, one = (StreamSummary(images=count, seconds=1.0, latency=0.0, devices="2") for count in (0, 1))
    status, facts, save, *_ = show(JobView(state="done", result=none))
    assert "Stopped before the first image" in status
    assert "Done" not in status
    assert facts == ""
    assert save["visible"] is False
    status, facts, *_ = show(JobView(state="done", result=one))
    assert "Done" in status
    assert "1 in 1.0 s" in facts


def test_a_size_that_no_plan_can_generate_is_not_offered(opened: Any) -> None:
    tab = PlanTab(opened("org/name", describe(tiny.build("sdxl").pipe)))
    message, generated, table = tab.show(2, 250, 256, True, 1)
    assert "width=250 is no multiple of 8, the model's grid: use 248 or 256" in unescape(message)
    assert (generated, table) == ("", "")
    assert "can be run" in tab.show(2, 256, 256, True, 1)[2]
