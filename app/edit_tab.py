"""The tab Edit: an image generated anew, all of it or the part that is painted over."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from . import html
from .blocks import preview_of
from .edit import MAX_SIDE, ImageEdit, edit
from .fields import CAPTIONS, GUIDANCE, UNIT, Forms, clears_error, result, seed_field
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons, connect_cancel, connect_start, reports_refusal
from .loras import loras_of
from .mask_editor import mask_editor
from .requests import MAX_STEPS, MIN_SIDE
from .state import AppState

HINT = "Choose an image. What you paint over is generated anew; without paint all of it is."


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error."""
    return gr.skip(), html.failure(message), gr.skip(), *buttons(None)


class EditTab(JobTab):
    """Event handlers of the tab."""

    kind = "edit"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, show, failed)

    def submit(self, owner: str, request: ImageEdit) -> Job:
        """Queue the job. Raises PlanError."""
        state = self._state

        def work(job: Job) -> Any:
            found = edit(state.image_runner, job, request)
            state.keep(owner, request.generate, found, {"Denoising strength": f"{request.strength:g}"})
            state.job_queue.store(owner, "run", found.run)
            return found

        return self._queue(owner, work)

    @reports_refusal(failed)
    async def generate(self, owner: str, painted: Any, side: Any, strength: Any, *fields: Any) -> AsyncIterator[Any]:
        """The button. `fields`: prompt, negative prompt, steps, guidance scale, seed, then the page's LoRAs."""
        names = ("prompt", "negative", "steps", "guidance", "seed")
        own, loras = dict(zip(names, fields[:5], strict=True)), loras_of(fields[5:])
        # Scales images, which must not block other pages.
        request = await asyncio.to_thread(ImageEdit.of, painted, side, strength, **own, loras=loras)
        async for update in self._updates(owner, self.submit(owner, request)):
            yield update


def show(view: JobView | None) -> tuple[Any, ...]:
    """Image, status, statistics, both buttons."""
    if view is not None and view.state == "done":
        found = view.result
        return found.image, html.status(view), html.facts(found.run, found.why, found.unknown), *buttons(view)
    return preview_of(view), html.status(view, HINT), "", *buttons(view)


def build(state: AppState, owner: gr.State, forms: Forms) -> tuple[EditTab, list[Any]]:
    """Build the tab. Returns it, and the outputs of `resume`."""
    tab = EditTab(state)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            painted = mask_editor("Image", elem_id="edit-image", height=380)
            fields = _fields(forms)
            with gr.Row():
                start = gr.Button("Generate", variant="primary", interactive=False, elem_id="edit-run")
                cancel = gr.Button("Cancel", interactive=False, elem_id="edit-cancel")
        with gr.Column(scale=6, min_width=320):
            image = result("Edited image", "edit-result", height=420)
            status = gr.HTML(html.notice(HINT), elem_id="edit-status")
            facts = gr.HTML(elem_id="edit-facts")
    filled = [image, status, facts, start, cancel]
    connect_start([start.click], tab.generate, [owner, painted, *fields, *forms.loras], filled, status)
    clears_error(status, HINT, [*fields, *forms.loras])
    connect_cancel(cancel, state, owner)
    return tab, filled


def _fields(forms: Forms) -> list[Any]:
    """Longer side, strength, prompt, negative prompt, steps, guidance scale, seed."""
    prompt = gr.Textbox(CAPTIONS[0], label="Prompt", lines=2)
    negative = gr.Textbox(label="Negative prompt", max_lines=2)
    with gr.Row():
        side = forms.add(
            gr.Slider,
            lambda each: {"value": max(each.height, each.width)},
            minimum=MIN_SIDE,
            maximum=MAX_SIDE,
            step=UNIT,
            label="Longer side",
            min_width=200,
        )
        strength = gr.Slider(0.05, 1, 0.75, step=0.05, label="Strength (1: ignore the image)", min_width=200)
    with gr.Row():
        steps = forms.add(
            gr.Slider, lambda each: {"value": each.steps}, minimum=1, maximum=MAX_STEPS, step=1, label="Steps"
        )
        guidance = forms.add(
            gr.Slider, lambda each: {"value": each.guidance}, minimum=0, maximum=20, step=0.5, label=GUIDANCE
        )
    return [side, strength, prompt, negative, steps, guidance, seed_field()]
