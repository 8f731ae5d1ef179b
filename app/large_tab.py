"""The tab High resolution: pictures larger than the model was trained for, out of a prompt or of a smaller picture."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr

from . import words
from .answers import answered
from .fields import CAPTIONS, Fields, Forms, picture_fields, result, result_pair, settles, uploaded
from .image_tab import buttons
from .jobs import Job, JobView
from .large import LARGEST_SCALE, UpscaleRequest, UpscaleResult, draw_again, draw_large, large_way
from .limits import picture_from
from .orders import LARGEST_SEED, LONGEST_PROMPT, MOST_STEPS, GenerateRequest
from .studio import AppState
from .watching import looked_at

KIND = "large"
EXPLAINED = (
    "Asked for twice its native size, a model repeats itself: two horizons, three balloons. Structure guidance draws "
    "the whole at native size first, which then leads overlapping windows. All devices share them."
)
AGAIN_EXPLAINED = (
    "A picture of yours is resized, given some noise, and drawn again from there: resizing cannot make detail, the "
    "model can. Say what it shows."
)
HINT = "Large pictures take long: a step draws many windows. Each step is shown."


def failed(sentence: str) -> tuple[Any, ...]:
    """What `show` fills, where something went wrong."""
    return gr.skip(), gr.skip(), words.failure(sentence), gr.skip(), *_buttons(None)


class LargeTab:
    """What the tab does."""

    def __init__(self, studio: AppState) -> None:
        self._studio = studio

    @answered(failed)
    async def draw(self, owner: str, options: str, beside: bool, *fields: Any) -> AsyncIterator[Any]:
        """The button of a prompt."""

        def begin() -> Job:
            studio, order = self._studio, Fields.order(*fields)
            way = large_way(studio.workers.count, options or "")
            return self._submit(owner, lambda job: draw_large(studio.artist, job, order, way, beside=bool(beside)))

        async for shown in self._begun(begin):
            yield shown

    @answered(failed)
    async def enlarge(self, owner: str, picture: Any, scale: Any, strength: Any, *fields: Any) -> AsyncIterator[Any]:
        """The button of a picture. `fields`: prompt, steps, seed."""

        def begin() -> Job:
            prompt, steps, seed = fields
            order = GenerateRequest.of(prompt=prompt, steps=steps, seed=seed)
            small = picture_from(picture)
            wanted = UpscaleRequest(picture=small, order=order, scale=float(scale or 0), strength=float(strength or 0))
            return self._submit(owner, lambda job: draw_again(self._studio.artist, job, wanted))

        async for shown in self._begun(begin):
            yield shown

    @answered(failed)
    async def resume(self, owner: str) -> AsyncIterator[Any]:
        """The page has been reloaded."""
        async for shown in looked_at(self._studio.desk.job_of(owner, KIND), show):
            yield shown

    def _submit(self, owner: str, drawn: Callable[[Job], UpscaleResult]) -> Job:
        """Raises PlanError."""

        def work(job: Job) -> UpscaleResult:
            found = drawn(job)
            self._studio.desk.keep(owner, "run", found.drawn.run)
            return found

        return self._studio.desk.submit(owner, KIND, work)

    async def _begun(self, begin: Callable[[], Job]) -> AsyncIterator[Any]:
        job = await asyncio.to_thread(begin)  # which decodes a picture, and other pages go on meanwhile
        async for shown in looked_at(job, show):
            yield shown


def show(view: JobView | None) -> tuple[Any, ...]:
    """Picture, pair, status, figures, buttons."""
    if view is None or view.state != "done":
        shown = view.preview if view is not None and view.preview is not None else gr.skip()
        return shown, gr.skip(), words.status(view, HINT), "", *_buttons(view)
    found: UpscaleResult = view.result
    pair = gr.update(visible=False)
    if found.beside is not None:
        pair = gr.update(value=(found.beside, found.drawn.image), label=found.pair, visible=True)
    figures = words.facts(found.drawn.run, found.drawn.why)
    return found.drawn.image, pair, words.status(view), figures, *_buttons(view)


def _buttons(view: JobView | None) -> tuple[Any, Any, Any]:
    begin, cancel = buttons(view)
    return begin, begin, cancel


def build(studio: AppState, owner: gr.State, forms: Forms) -> tuple[LargeTab, list[Any]]:
    """Lay the tab out. Returns it, and what `resume` fills."""
    tab = LargeTab(studio)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            with gr.Tabs():
                with gr.Tab("Out of a prompt"):
                    prompted = _PromptFields(forms)
                with gr.Tab("Out of a picture"):
                    again = _PictureFields()
            cancel = gr.Button("Cancel", interactive=False, elem_id="large-cancel")
        with gr.Column(scale=6, min_width=320):
            picture = result("Large picture", "large-picture", height=480)
            status = gr.HTML(words.notice(HINT), elem_id="large-status")
            figures = gr.HTML(elem_id="large-facts")
            pair = result_pair("Beside it", "large-pair", visible=False)
    filled = [picture, pair, status, figures, prompted.begin, again.begin, cancel]
    prompted.begin.click(tab.draw, [owner, *prompted.components], filled, show_progress="hidden")
    again.begin.click(tab.enlarge, [owner, *again.components], filled, show_progress="hidden")
    settles(status, HINT, [*prompted.components, *again.components])
    cancel.click(answered()(studio.desk.cancel), owner, None, show_progress="hidden")
    return tab, filled


class _PromptFields:
    """What a picture out of a prompt is told."""

    def __init__(self, forms: Forms) -> None:
        gr.HTML(words.notice(EXPLAINED))
        fields = picture_fields(forms, times=2)
        options = gr.Textbox(label="Options of structure guidance", placeholder="overlap=0.25,kept=0.5", max_lines=1)
        beside = gr.Checkbox(False, label="Draw it directly as well, to compare")
        self.begin = gr.Button("Draw large", variant="primary", interactive=False, elem_id="large-run")
        self.components = [options, beside, *fields.components]


class _PictureFields:
    """What a picture that is drawn again is told."""

    def __init__(self) -> None:
        gr.HTML(words.notice(AGAIN_EXPLAINED))
        picture = uploaded("Picture", sources=["upload", "clipboard"], elem_id="again-picture", height=220)
        prompt = gr.Textbox(label="What it shows", placeholder=CAPTIONS[0], max_lines=2, max_length=LONGEST_PROMPT)
        with gr.Row():
            scale = gr.Slider(1.25, LARGEST_SCALE, 2, step=0.25, label="Scale", min_width=200)
            strength = gr.Slider(0.05, 0.95, 0.35, step=0.05, label="Strength: how much is new", min_width=200)
        with gr.Row():
            steps = gr.Slider(1, MOST_STEPS, 30, step=1, label="Steps", min_width=200)
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, min_width=200)
        self.begin = gr.Button("Draw it larger", variant="primary", interactive=False, elem_id="again-run")
        self.components = [picture, scale, strength, prompt, steps, seed]
