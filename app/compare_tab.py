"""The tab Compare: the same seed in two ways, a slider over the pair, where they differ."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from . import words
from .answers import answered
from .comparison import HEAD, Comparison, compare
from .fields import Fields, Forms, picture_fields, result, result_pair, settles
from .image_tab import buttons
from .jobs import Job, JobView
from .studio import AppState
from .watching import looked_at
from .ways import Preset, way_named

KIND = "compare"
HINT = "Press Compare: the same picture is drawn in both ways, one after the other, and held against each other."


def failed(sentence: str) -> tuple[Any, ...]:
    """What `show` fills, where something went wrong."""
    return gr.skip(), gr.skip(), words.failure(sentence), gr.skip(), *buttons(None)


class CompareTab:
    """What the tab does."""

    def __init__(self, studio: AppState) -> None:
        self._studio = studio

    def submit(self, owner: str, fields: tuple[Any, ...], labels: tuple[str, str]) -> Job:
        """Begin. Raises PlanError."""
        studio, order = self._studio, Fields.order(*fields)
        first, second = (way_named(label, studio.workers.count) for label in labels)

        def work(job: Job) -> tuple[Comparison, tuple[Preset, Preset]]:
            return compare(studio.artist, job, order, (first, second)), (first, second)

        return studio.desk.submit(owner, KIND, work)

    @answered(failed)
    async def run(self, owner: str, one: str, other: str, *fields: Any) -> AsyncIterator[Any]:
        """The button."""
        job = self.submit(owner, fields, (one, other))
        async for shown in looked_at(job, show):
            yield shown

    @answered(failed)
    async def resume(self, owner: str) -> AsyncIterator[Any]:
        """The page has been reloaded."""
        async for shown in looked_at(self._studio.desk.job_of(owner, KIND), show):
            yield shown


def show(view: JobView | None) -> tuple[Any, ...]:
    """Pair, difference, status, table, both buttons."""
    if view is None or view.state != "done":
        return gr.skip(), gr.skip(), words.status(view, HINT), gr.skip(), *buttons(view)
    found: Comparison
    found, ways = view.result
    pair = (found.one.image, found.other.image)
    table = words.table(HEAD, found.rows((ways[0].label, ways[1].label)))
    difference = gr.update(value=found.difference, label=_label(found))
    return pair, difference, words.notice(found.verdict), table, *buttons(view)


def _label(found: Comparison) -> str:
    return f"Difference, {found.gain:,.0f} times as bright" if found.largest else "Difference: none"


def build(studio: AppState, owner: gr.State, forms: Forms) -> tuple[CompareTab, list[Any]]:
    """Lay the tab out. Returns it, and what `resume` fills."""
    tab = CompareTab(studio)
    labels = [way.label for way in studio.workers.ways]
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            fields = picture_fields(forms)
            one = gr.Dropdown(labels, value=labels[min(1, len(labels) - 1)], label="Left: drawn by")
            other = gr.Dropdown(labels, value=labels[-2 if len(labels) > 2 else 0], label="Right: drawn by")
            with gr.Row():
                begin = gr.Button("Compare", variant="primary", interactive=False, elem_id="compare-run")
                cancel = gr.Button("Cancel", interactive=False, elem_id="compare-cancel")
        with gr.Column(scale=6, min_width=320):
            status = gr.HTML(words.notice(HINT), elem_id="compare-status")
            pair = result_pair("Left and right", "compare-pair", height=420)
            difference = result("Difference", "compare-difference", height=240)
    table = gr.HTML(elem_id="compare-table")
    filled = [pair, difference, status, table, begin, cancel]
    gr.on([begin.click], tab.run, [owner, one, other, *fields.components], filled, show_progress="hidden")
    settles(status, HINT, [*fields.components, one, other])
    cancel.click(answered()(studio.desk.cancel), owner, None, show_progress="hidden")
    return tab, filled
