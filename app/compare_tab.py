"""The tab Compare: the same seed with two presets, a slider over the pair, their difference."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from . import html
from .comparison import HEAD, ComparedImages, compare
from .fields import Fields, Forms, clears_error, image_fields, result, result_pair
from .handler_errors import reports_errors
from .image_tab import buttons
from .job_queue import Job, JobView
from .job_tab import JobTab
from .presets import Preset, preset_named
from .state import AppState

HINT = "Press Compare: the same image is generated with both presets, one after the other, and compared."


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error."""
    return gr.skip(), gr.skip(), html.failure(message), gr.skip(), *buttons(None)


class CompareTab(JobTab):
    """Event handlers of the tab."""

    kind = "compare"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, show, failed)

    def submit(self, owner: str, fields: tuple[Any, ...], labels: tuple[str, str]) -> Job:
        """Queue the job. Raises PlanError."""
        state, request = self._state, Fields.request(*fields)
        first, second = (preset_named(label, state.workers.count) for label in labels)

        def work(job: Job) -> tuple[ComparedImages, tuple[Preset, Preset]]:
            return compare(state.image_runner, job, request, (first, second)), (first, second)

        return self._queue(owner, work)

    @reports_errors(failed)
    async def run(self, owner: str, one: str, other: str, *fields: Any) -> AsyncIterator[Any]:
        """The button."""
        job = self.submit(owner, fields, (one, other))
        async for update in self._updates(owner, job):
            yield update


def show(view: JobView | None) -> tuple[Any, ...]:
    """Pair, difference, status, table, both buttons."""
    if view is None or view.state != "done":
        return gr.skip(), gr.skip(), html.status(view, HINT), gr.skip(), *buttons(view)
    found: ComparedImages
    found, presets = view.result
    pair = (found.one.image, found.other.image)
    table = html.table(HEAD, found.rows((presets[0].label, presets[1].label)))
    difference = gr.update(value=found.difference, label=_label(found))
    return pair, difference, html.notice(found.summary), table, *buttons(view)


def _label(found: ComparedImages) -> str:
    return f"Difference, {found.gain:,.0f} times as bright" if found.largest else "Difference: none"


def build(state: AppState, owner: gr.State, forms: Forms) -> tuple[CompareTab, list[Any]]:
    """Build the tab. Returns it, and the outputs of `resume`."""
    tab = CompareTab(state)
    presets = state.workers.presets
    labels, choices = [each.label for each in presets], [(each.title, each.label) for each in presets]
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            fields = image_fields(forms)
            one = gr.Dropdown(choices, value=labels[min(1, len(labels) - 1)], label="Left")
            other = gr.Dropdown(choices, value=labels[-2 if len(labels) > 2 else 0], label="Right")
            with gr.Row():
                start = gr.Button("Compare", variant="primary", interactive=False, elem_id="compare-run")
                cancel = gr.Button("Cancel", interactive=False, elem_id="compare-cancel")
        with gr.Column(scale=6, min_width=320):
            status = gr.HTML(html.notice(HINT), elem_id="compare-status")
            pair = result_pair("Left and right", "compare-pair", height=420)
            difference = result("Difference", "compare-difference", height=240)
    table = gr.HTML(elem_id="compare-table")
    filled = [pair, difference, status, table, start, cancel]
    gr.on([start.click], tab.run, [owner, one, other, *fields.components, *forms.loras], filled, show_progress="hidden")
    clears_error(status, HINT, [*fields.components, one, other, *forms.loras])
    cancel.click(reports_errors()(state.job_queue.cancel), owner, None, show_progress="hidden")
    return tab, filled
