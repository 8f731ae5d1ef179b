"""The tab High resolution: images above the model's native size, from a prompt or from a smaller image."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr

from . import html
from .blocks import preview_of
from .fields import CAPTIONS, Fields, Forms, clears_error, image_fields, result, result_pair, uploaded
from .high_res import MAX_SCALE, UpscaleRequest, UpscaleResult, generate_high_res, high_res_preset, upscale_image
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons, connect_cancel, connect_start, reports_refusal
from .limits import read_image
from .loras import loras_of
from .requests import MAX_STEPS, GenerateRequest
from .state import AppState

EXPLAINED = (
    "Above its native size a model repeats objects: two horizons, three balloons. Structure guidance first generates "
    "the whole image at native size, which then guides overlapping windows. All devices share the windows."
)
AGAIN_EXPLAINED = (
    "An uploaded image is resized, noised and denoised again: the model adds detail that resizing cannot. "
    "Describe the image in the prompt."
)
HINT = "Large images take long: each step denoises many windows. Each step is shown."


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error."""
    return gr.skip(), gr.skip(), html.failure(message), gr.skip(), *_buttons(None)


class LargeTab(JobTab):
    """Event handlers of the tab."""

    kind = "high-res"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, show, failed)

    @reports_refusal(failed)
    async def generate(self, owner: str, options: str, baseline: bool, *fields: Any) -> AsyncIterator[Any]:
        """The button of the prompt tab."""

        def start() -> Job:
            state, request = self._state, Fields.request(*fields)
            preset = high_res_preset(state.workers.count, options or "")

            def generated(job: Job) -> UpscaleResult:
                found = generate_high_res(state.image_runner, job, request, preset, baseline=bool(baseline))
                state.keep(owner, request, found.generated)
                return found

            return self._submit(owner, generated)

        async for update in self._started(owner, start):
            yield update

    @reports_refusal(failed)
    async def upscale(self, owner: str, image: Any, scale: Any, strength: Any, *fields: Any) -> AsyncIterator[Any]:
        """The button of the image tab. `fields`: prompt, steps, seed, then the page's LoRAs."""

        def start() -> Job:
            prompt, steps, seed, *loras = fields
            request = GenerateRequest.of(prompt=prompt, steps=steps, seed=seed, loras=loras_of(loras))
            small = read_image(image)
            upscale = UpscaleRequest(
                image=small, generate=request, scale=float(scale or 0), strength=float(strength or 0)
            )
            return self._submit(owner, lambda job: upscale_image(self._state.image_runner, job, upscale))

        async for update in self._started(owner, start):
            yield update

    def _submit(self, owner: str, generated: Callable[[Job], UpscaleResult]) -> Job:
        """Raises PlanError."""

        def work(job: Job) -> UpscaleResult:
            found = generated(job)
            self._state.job_queue.store(owner, "run", found.generated.run)
            return found

        return self._queue(owner, work)

    async def _started(self, owner: str, start: Callable[[], Job]) -> AsyncIterator[Any]:
        job = await asyncio.to_thread(start)  # decodes an image, which must not block other pages
        async for update in self._updates(owner, job):
            yield update


def show(view: JobView | None) -> tuple[Any, ...]:
    """Image, pair, status, statistics, buttons."""
    if view is None or view.state != "done":
        return preview_of(view), gr.skip(), html.status(view, HINT), "", *_buttons(view)
    found: UpscaleResult = view.result
    pair = gr.update(visible=False)
    if found.baseline is not None:
        pair = gr.update(value=(found.baseline, found.generated.image), label=found.pair, visible=True)
    figures = html.facts(found.generated.run, found.generated.why)
    return found.generated.image, pair, html.status(view), figures, *_buttons(view)


def _buttons(view: JobView | None) -> tuple[Any, Any, Any]:
    start, cancel = buttons(view)
    return start, start, cancel


def build(state: AppState, owner: gr.State, forms: Forms) -> tuple[LargeTab, list[Any]]:
    """Build the tab. Returns it, and the outputs of `resume`."""
    tab = LargeTab(state)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            with gr.Tabs():
                with gr.Tab("From a prompt"):
                    prompted = _PromptFields(forms)
                with gr.Tab("From an image"):
                    again = _UpscaleFields()
            cancel = gr.Button("Cancel", interactive=False, elem_id="high-res-cancel")
        with gr.Column(scale=6, min_width=320):
            image = result("Large image", "high-res-result", height=480)
            status = gr.HTML(html.notice(HINT), elem_id="high-res-status")
            figures = gr.HTML(elem_id="high-res-facts")
            pair = result_pair("Comparison", "high-res-pair", visible=False)
    filled = [image, pair, status, figures, prompted.start, again.start, cancel]
    inputs = [owner, *prompted.components, *forms.loras]
    connect_start([prompted.start.click], tab.generate, inputs, filled, status)
    connect_start([again.start.click], tab.upscale, [owner, *again.components, *forms.loras], filled, status)
    clears_error(status, HINT, [*prompted.components, *again.components, *forms.loras])
    connect_cancel(cancel, state, owner)
    return tab, filled


class _PromptFields:
    """Fields of generation from a prompt."""

    def __init__(self, forms: Forms) -> None:
        gr.HTML(html.notice(EXPLAINED))
        fields = image_fields(forms, times=2)
        options = gr.Textbox(
            label="Structure guidance options", placeholder="overlap=0.25,structure_strength=0.5", max_lines=1
        )
        baseline = gr.Checkbox(False, label="Also without structure guidance, to compare")
        with gr.Row():
            self.start = gr.Button("Generate", variant="primary", interactive=False, elem_id="high-res-run")
        self.components = [options, baseline, *fields.components]


class _UpscaleFields:
    """Fields of upscaling."""

    def __init__(self) -> None:
        gr.HTML(html.notice(AGAIN_EXPLAINED))
        image = uploaded("Image", sources=["upload", "clipboard"], elem_id="upscale-image", height=220)
        prompt = gr.Textbox(label="Prompt", placeholder=CAPTIONS[0], max_lines=2)
        with gr.Row():
            scale = gr.Slider(1.25, MAX_SCALE, 2, step=0.25, label="Scale", min_width=200)
            strength = gr.Slider(0.05, 0.95, 0.35, step=0.05, label="Strength (1: ignore the input)", min_width=200)
        with gr.Row():
            steps = gr.Slider(1, MAX_STEPS, 30, step=1, label="Steps", min_width=200)
            seed = gr.Number(0, label="Seed", precision=0, min_width=200)
        with gr.Row():
            self.start = gr.Button("Upscale", variant="primary", interactive=False, elem_id="upscale-run")
        self.components = [image, scale, strength, prompt, steps, seed]
