"""The tab Image: a prompt, a way to share the work, the picture while it is made."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from patchpar import PlanError
from patchpar.models.files import EMBEDDED

from . import words
from .answers import answered
from .drawing import JobImage, RunOptions
from .fields import Fields, Forms, captions, picture_fields, result, settles
from .jobs import Job, JobView
from .orders import GenerateRequest
from .studio import AppState
from .watching import looked_at
from .ways import OWN, OWN_MEANS, Preset, own_way, way_named

KIND = "image"
HINT = "Press Draw: the picture is shown after every step, and what each run cost below it."


def failed(sentence: str) -> tuple[Any, ...]:
    """What `show` fills, where something went wrong."""
    return gr.skip(), words.failure(sentence), gr.skip(), *buttons(None)


class ImageTab:
    """What the tab does, apart from how it looks."""

    def __init__(self, studio: AppState) -> None:
        self._studio = studio

    @answered(lambda sentence: (words.failure(sentence), gr.skip(), gr.skip()))
    def choose(self, label: str) -> tuple[Any, Any, Any]:
        """Another line of the list: (what it means, plan and strategy of one's own, emptied where it is not that)."""
        if label == OWN:
            return words.notice(OWN_MEANS), gr.skip(), gr.skip()
        return words.notice(way_named(label, self._studio.workers.count).means), "", ""

    @answered(lambda sentence: (gr.skip(), words.failure(sentence)))
    def write(self, degrees: str, strategy: str) -> tuple[Any, str]:
        """A plan or a strategy of one's own is being written, or emptied: (the line of the list, what it means)."""
        if (degrees or "").strip() or (strategy or "").strip():
            return gr.update(value=OWN), words.notice(OWN_MEANS)
        first = self._studio.workers.ways[0]
        return gr.update(value=first.label), words.notice(first.means)

    def way(self, label: str, degrees: str, strategy: str) -> Preset:
        """The way that a person has chosen. Raises PlanError."""
        count = self._studio.workers.count
        if label == OWN and not (degrees or strategy or "").strip():
            raise PlanError("your own plan is empty: fill it in, or choose another line of the list")
        return own_way(degrees or "", strategy or "", count) or way_named(label, count)

    def submit(self, owner: str, order: GenerateRequest, way: Preset, traced: bool) -> Job:
        """Begin to draw. Raises PlanError."""
        studio = self._studio

        def work(job: Job) -> JobImage:
            picture = studio.artist.draw(job, order, way, RunOptions(traced=traced))
            studio.desk.keep(owner, "run", picture.run)
            return picture

        return studio.desk.submit(owner, KIND, work)

    @answered(failed)
    async def draw(self, owner: str, label: str, degrees: str, strategy: str, *rest: Any) -> AsyncIterator[Any]:
        """The button: check, wait in line, draw. `rest`: whether to trace, then the fields of an order."""
        traced, *fields = rest
        job = self.submit(owner, Fields.order(*fields), self.way(label, degrees, strategy), bool(traced))
        async for shown in looked_at(job, show):
            yield shown

    @answered(failed)
    async def resume(self, owner: str) -> AsyncIterator[Any]:
        """The page has been reloaded: go on showing what it had."""
        async for shown in looked_at(self._studio.desk.job_of(owner, KIND), show):
            yield shown


def show(view: JobView | None) -> tuple[Any, ...]:
    """Picture, status, figures, both buttons."""
    if view is not None and view.state == "done":
        picture: JobImage = view.result
        return picture.image, words.status(view), words.facts(picture.run, picture.why), *buttons(view)
    shown = view.preview if view is not None and view.preview is not None else gr.skip()
    return shown, words.status(view, HINT), "", *buttons(view)


def buttons(view: JobView | None) -> tuple[Any, Any]:
    """The one that begins and the one that cancels: one of them can be pressed."""
    is_busy = view is not None and not view.is_over
    return gr.update(interactive=not is_busy), gr.update(interactive=is_busy)


def build(studio: AppState, owner: gr.State, forms: Forms) -> tuple[ImageTab, list[Any]]:
    """Lay the tab out. Returns it, and what `resume` fills."""
    tab = ImageTab(studio)
    ways = studio.workers.ways
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            fields = picture_fields(forms)
            way = gr.Dropdown([*(each.label for each in ways), OWN], value=ways[0].label, label="Devices and strategy")
            means = gr.HTML(words.notice(ways[0].means))
            with gr.Accordion("Your own plan", open=False):
                degrees = gr.Textbox(label="Plan", placeholder="cfg=2,patch=2", max_lines=1)
                strategy = gr.Textbox(label="Strategy", placeholder="fresh-edges:context=pooled", max_lines=1)
                traced = gr.Checkbox(True, label="Record a timeline")
            with gr.Row():
                begin = gr.Button("Draw", variant="primary", interactive=False, elem_id="image-draw")
                cancel = gr.Button("Cancel", interactive=False, elem_id="image-cancel")
        with gr.Column(scale=6, min_width=320):
            picture = result("Picture", "image-picture", height=420)
            status = gr.HTML(words.notice(HINT), elem_id="image-status")
            facts = gr.HTML(elem_id="image-facts")
    if studio.workers.setup.model in EMBEDDED:
        captions(fields.prompt)
    filled = [picture, status, facts, begin, cancel]
    way.input(tab.choose, way, [means, degrees, strategy], show_progress="hidden")
    written = [degrees.input, strategy.input]
    gr.on(written, tab.write, [degrees, strategy], [way, means], trigger_mode="always_last", show_progress="hidden")
    settles(status, HINT, [*fields.components, way, degrees, strategy])
    inputs = [owner, way, degrees, strategy, traced, *fields.components]
    gr.on([begin.click, fields.prompt.submit], tab.draw, inputs, filled, show_progress="hidden")
    cancel.click(answered()(studio.desk.cancel), owner, None, show_progress="hidden")
    return tab, filled
