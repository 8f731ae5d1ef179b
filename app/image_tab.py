"""The tab Image: a prompt, a preset for devices and strategy, previews, run statistics and a history."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import gradio as gr

from patchpar import PlanError
from patchpar.models.files import EMBEDDED

from . import html
from .blocks import preview_of
from .fields import Fields, Forms, captions, clears_error, image_fields, result
from .forecast_panel import ForecastPanel
from .handler_errors import reports_errors
from .history_panel import UNCHANGED, HistoryPanel
from .image_runner import JobImage, RunOptions
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons, connect_cancel, connect_start, reports_refusal
from .presets import CUSTOM, CUSTOM_MEANING, Preset, custom_preset, preset_named
from .requests import GenerateRequest, as_whole, check_whole
from .state import AppState

MAX_IMAGES = 8  # of one job
HINT = "Press Generate, or ctrl-enter: a preview is shown after every step, run statistics at the end."


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error."""
    return gr.skip(), html.failure(message), gr.skip(), *buttons(None)


class ImageTab(JobTab):
    """Event handlers of the tab."""

    kind = "image"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, show, lambda message: (*failed(message), *UNCHANGED))
        self.history = HistoryPanel(state)

    @reports_errors(lambda message: (html.failure(message), gr.skip(), gr.skip()))
    def choose(self, label: str) -> tuple[Any, Any, Any]:
        """A preset was selected: (its meaning, custom plan and strategy, emptied unless custom)."""
        if label == CUSTOM:
            return html.notice(CUSTOM_MEANING), gr.skip(), gr.skip()
        return html.notice(preset_named(label, self._state.workers.count).meaning), "", ""

    @reports_errors(lambda message: (gr.skip(), html.failure(message)))
    def write(self, degrees: str, strategy: str) -> tuple[Any, str]:
        """Custom plan or strategy was edited: (selected preset, its meaning)."""
        if (degrees or "").strip() or (strategy or "").strip():
            return gr.update(value=CUSTOM), html.notice(CUSTOM_MEANING)
        first = self._state.workers.presets[0]
        return gr.update(value=first.label), html.notice(first.meaning)

    def preset(self, label: str, degrees: str, strategy: str) -> Preset:
        """The selected or custom preset. Raises PlanError."""
        count = self._state.workers.count
        if label == CUSTOM and not (degrees or strategy or "").strip():
            raise PlanError("the custom plan is empty: fill it in, or select a preset")
        return custom_preset(degrees or "", strategy or "", count) or preset_named(label, count)

    def submit(self, owner: str, requests: list[GenerateRequest], preset: Preset, traced: bool) -> Job:
        """Queue a job for one image or several; its result is the last one. Raises PlanError."""
        state = self._state

        def work(job: Job) -> JobImage:
            for number, request in enumerate(requests, 1):
                title = "generating" if len(requests) == 1 else f"image {number} of {len(requests)}"
                image = state.image_runner.generate(job, request, preset, RunOptions(title=title, traced=traced))
                state.job_queue.store(owner, "run", image.run)
                state.keep(owner, request, image)
            return image

        return self._queue(owner, work)

    @reports_refusal(failed)
    async def generate(self, owner: str, label: str, degrees: str, strategy: str, *rest: Any) -> AsyncIterator[Any]:
        """The button. `rest`: whether to trace, how many images, then the fields of a request and the page's LoRAs."""
        traced, count, *fields = rest
        requests = with_seeds(Fields.request(*fields), count)
        job = self.submit(owner, requests, self.preset(label, degrees, strategy), bool(traced))
        async for update in self._updates(owner, job):
            yield update

    async def _resume(self, owner: str) -> AsyncIterator[Any]:
        """Outputs of the last job, and the history once it cannot grow."""
        job = self._state.job_queue.job_of(owner, self.kind)
        async for update in self._updates(owner, job):
            is_over = job is None or job.view.is_over
            yield *update, *(self.history.updates(owner) if is_over else UNCHANGED)


def with_seeds(request: GenerateRequest, count: Any) -> list[GenerateRequest]:
    """As many requests, with this seed and the ones after it. Raises PlanError."""
    count = as_whole(count)
    check_whole("images", count, 1, MAX_IMAGES)
    return [replace(request, seed=request.seed + number) for number in range(count)]


def show(view: JobView | None) -> tuple[Any, ...]:
    """Image, status, statistics, both buttons."""
    if view is not None and view.state == "done":
        image: JobImage = view.result
        return image.image, html.status(view), html.facts(image.run, image.why, image.unknown), *buttons(view)
    return preview_of(view), html.status(view, HINT), "", *buttons(view)


def build(state: AppState, owner: gr.State, forms: Forms) -> tuple[ImageTab, list[Any]]:
    """Build the tab. Returns it, and the outputs of `resume`."""
    tab = ImageTab(state)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            fields = image_fields(forms)
            chosen, traced = _plan_fields(tab, state)
            forecast = ForecastPanel(state)
            forecast.build()
            count = gr.Slider(1, MAX_IMAGES, 1, step=1, label="Images (seeds that follow)")
            with gr.Row():
                start = gr.Button("Generate", variant="primary", interactive=False, elem_id="image-generate")
                cancel = gr.Button("Cancel", interactive=False, elem_id="image-cancel")
            forecast.connect(owner, fields, start, cancel)
            file = tab.history.build_reader()
        with gr.Column(scale=6, min_width=320):
            image = result("Image", "image-result", height=420)
            status = gr.HTML(html.notice(HINT), elem_id="image-status")
            facts = gr.HTML(elem_id="image-facts")
            history = tab.history.build(owner, fields, (image, status, facts))
    if state.workers.setup.model in EMBEDDED:
        captions(fields.prompt)
    filled = [image, status, facts, start, cancel]
    clears_error(status, HINT, [*fields.components, *chosen, count, *forms.loras])
    inputs = [owner, *chosen, traced, count, *fields.components, *forms.loras]
    clicked = connect_start([start.click, fields.prompt.submit], tab.generate, inputs, filled, status)
    # An event of its own: with each message of the job the browser would update the history, too.
    clicked.then(tab.history.refresh, owner, history, show_progress="hidden")
    connect_cancel(cancel, state, owner)
    file.upload(tab.history.read, file, [status, *fields.components], show_progress="hidden")
    return tab, [*filled, *history]


def _plan_fields(tab: ImageTab, state: AppState) -> tuple[list[Any], gr.Checkbox]:
    """Add preset, custom plan and strategy, which are returned first, and whether to record a timeline."""
    presets = state.workers.presets
    preset = gr.Dropdown(
        [*((each.title, each.label) for each in presets), CUSTOM],
        value=presets[0].label,
        label="Speed and quality: devices and strategy",
    )
    meaning = gr.HTML(html.notice(presets[0].meaning))
    with gr.Accordion("Custom plan", open=False):
        degrees = gr.Textbox(label="Plan", placeholder="cfg=2,patch=2", max_lines=1)
        strategy = gr.Textbox(label="Strategy", placeholder="fresh-edges:context=pooled", max_lines=1)
        traced = gr.Checkbox(True, label="Record a timeline")
    preset.input(tab.choose, preset, [meaning, degrees, strategy], show_progress="hidden")
    gr.on(
        [degrees.input, strategy.input],
        tab.write,
        [degrees, strategy],
        [preset, meaning],
        trigger_mode="always_last",
        show_progress="hidden",
    )
    return [preset, degrees, strategy], traced
