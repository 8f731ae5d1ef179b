"""The tab High resolution: pictures larger than the model was trained for, led by structure guidance."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from patchpar import PatchparError

from . import words
from .drawing import Artist, Manner, Picture
from .fields import Fields, picture_fields, result, result_pair
from .image_tab import buttons
from .jobs import Job, View
from .orders import Order
from .studio import Studio
from .watching import looked_at
from .ways import Way, plain

KIND = "large"
EXPLAINED = (
    "Asked for twice its native size, a model repeats itself: two horizons, three balloons. Structure guidance draws "
    "the whole at native size first, which then leads overlapping windows. All devices share them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargePictures:
    """One picture by structure guidance; and the same caption and seed drawn directly, where that was asked for."""

    guided: Picture
    direct: Picture | None


def large_way(count: int, options: str) -> Way:
    """Structure guidance on all devices, with options as on the command line. Raises PlanError."""
    strategy = f"asg:{options.strip()}" if options.strip() else "asg"
    way = Way(label="Structure guidance", degrees=f"patch={count}", strategy=strategy)
    way.plan(count)
    return way


def direct_way(count: int) -> Way:
    """The picture as the plain pipeline draws it at this size."""
    return plain() if count == 1 else Way(label="Directly", degrees=f"patch={count}")


def draw_large(artist: Artist, job: Job, order: Order, way: Way, *, beside: bool) -> LargePictures:
    """Draw it; `beside`: also directly."""
    guided = artist.draw(job, order, way, Manner(title="structure guidance"))
    direct = None
    if beside:
        manner = Manner(title="directly, to compare", traced=False)
        direct = artist.draw(job, order, direct_way(artist.workers.count), manner)
    return LargePictures(guided=guided, direct=direct)


class LargeTab:
    """What the tab does."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio

    def submit(self, owner: str, fields: tuple[Any, ...], options: str, beside: bool) -> Job:
        """Begin. Raises PlanError."""
        studio, order = self._studio, Fields.order(*fields)
        way = large_way(studio.workers.count, options or "")

        def work(job: Job) -> LargePictures:
            found = draw_large(studio.artist, job, order, way, beside=beside)
            studio.desk.keep(owner, "run", found.guided.run)
            return found

        return studio.desk.submit(owner, KIND, work)

    async def run(self, owner: str, options: str, beside: bool, *fields: Any) -> AsyncIterator[Any]:
        """The button."""
        try:
            job = self.submit(owner, fields, options, bool(beside))
        except PatchparError as error:
            yield gr.skip(), gr.skip(), words.failure(str(error)), gr.skip(), *buttons(None)
            return
        async for shown in looked_at(job, show):
            yield shown

    async def resume(self, owner: str) -> AsyncIterator[Any]:
        """The page has been reloaded."""
        async for shown in looked_at(self._studio.desk.job_of(owner, KIND), show):
            yield shown


def show(view: View | None) -> tuple[Any, ...]:
    """Picture, pair, status, figures, both buttons."""
    if view is None or view.state != "done":
        shown = view.preview if view is not None and view.preview is not None else gr.skip()
        return shown, gr.skip(), words.status(view), "", *buttons(view)
    found: LargePictures = view.result
    pair = gr.update(visible=False)
    if found.direct is not None:
        pair = gr.update(value=(found.direct.image, found.guided.image), visible=True)
    figures = words.facts(found.guided.run, found.guided.why)
    return found.guided.image, pair, words.status(view), figures, *buttons(view)


def build(studio: Studio, owner: gr.State) -> tuple[LargeTab, list[Any]]:
    """Lay the tab out. Returns it, and what `resume` fills."""
    tab = LargeTab(studio)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            gr.HTML(words.notice(EXPLAINED))
            fields = picture_fields(studio.workers.setup.side, times=2, steps=12)
            options = gr.Textbox(
                label="Options of structure guidance", placeholder="overlap=0.25,kept=0.5", max_lines=1
            )
            beside = gr.Checkbox(False, label="Draw it directly as well, to compare")
            with gr.Row():
                begin = gr.Button("Draw large", variant="primary", interactive=False, elem_id="large-run")
                cancel = gr.Button("Cancel", interactive=False, elem_id="large-cancel")
        with gr.Column(scale=6, min_width=320):
            picture = result("Structure guidance", "large-picture")
            status = gr.HTML(words.status(None), elem_id="large-status")
            figures = gr.HTML(elem_id="large-facts")
            pair = result_pair("Directly, and with structure guidance", "large-pair", visible=False)
    filled = [picture, pair, status, figures, begin, cancel]
    begin.click(tab.run, [owner, options, beside, *fields.components], filled, show_progress="hidden")
    cancel.click(studio.desk.cancel, owner, None, show_progress="hidden")
    return tab, filled
