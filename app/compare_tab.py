"""The tab Compare: the same seed with two presets or plans, a slider over the pair, their difference."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from . import html
from .comparison import HEAD, ComparedImages, compare
from .fields import Fields, Forms, clears_error, image_fields, result, result_pair
from .handler_errors import reports_errors
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons, connect_cancel, connect_start, reports_refusal
from .presets import Preset, preset_or_plan
from .state import AppState

HINT = "Press Compare: the same image is generated in both ways, one after the other. Both go to the history."


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
        first, second = (preset_or_plan(label, state.workers.count) for label in labels)

        def work(job: Job) -> tuple[ComparedImages, tuple[Preset, Preset]]:
            found = compare(state.image_runner, job, request, (first, second))
            for image in (found.one, found.other):
                state.keep(owner, request, image)
            return found, (first, second)

        return self._queue(owner, work)

    @reports_refusal(failed)
    async def run(self, owner: str, one: str, other: str, *fields: Any) -> AsyncIterator[Any]:
        """The button."""
        job = self.submit(owner, fields, (one, other))
        async for update in self._updates(owner, job):
            yield update

    @reports_errors(lambda message: (gr.skip(), gr.skip(), gr.skip(), html.failure(message)))
    def reverse(self, owner: str, one: str, other: str) -> tuple[Any, ...]:
        """The button that changes sides: (left preset, right preset, pair, table). Nothing is generated."""
        job = self._state.job_queue.job_of(owner, self.kind)
        if job is None or job.view.state != "done":
            return other, one, gr.skip(), gr.skip()
        found, presets = job.view.result
        labels, displayed = [preset.label for preset in presets], [(each or "").strip() for each in (other, one)]
        if displayed not in (labels, labels[::-1]):  # other presets have been chosen since
            return other, one, gr.skip(), gr.skip()
        return other, one, *sides(found, presets, is_reversed=displayed != labels)


def show(view: JobView | None) -> tuple[Any, ...]:
    """Pair, difference, status, table, both buttons."""
    if view is None or view.state != "done":
        return gr.skip(), gr.skip(), html.status(view, HINT), gr.skip(), *buttons(view)
    found: ComparedImages
    found, presets = view.result
    pair, table = sides(found, presets)
    difference = gr.update(value=found.difference, label=_label(found))
    return pair, difference, html.notice(found.summary), table, *buttons(view)


def sides(found: ComparedImages, presets: tuple[Preset, Preset], *, is_reversed: bool = False) -> tuple[Any, str]:
    """The pair, whose label names both sides, and the table."""
    images, names = (found.one.image, found.other.image), (presets[0].label, presets[1].label)
    rows = found.rows(names)
    left, right = (1, 0) if is_reversed else (0, 1)
    label = f"Left: {names[left]}. Right: {names[right]}."
    pair = gr.update(value=(images[left], images[right]), label=label)
    return pair, html.table(HEAD, [rows[left], rows[right]])


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
            one, other = (
                gr.Dropdown(choices, value=labels[number], label=f"{side}: a preset or a plan", allow_custom_value=True)
                for side, number in (("Left", min(1, len(labels) - 1)), ("Right", -2 if len(labels) > 2 else 0))
            )
            exchange = gr.Button("Change sides", size="sm", elem_id="compare-reverse")
            with gr.Row():
                start = gr.Button("Compare", variant="primary", interactive=False, elem_id="compare-run")
                cancel = gr.Button("Cancel", interactive=False, elem_id="compare-cancel")
        with gr.Column(scale=6, min_width=320):
            status = gr.HTML(html.notice(HINT), elem_id="compare-status")
            pair = result_pair("Left and right", "compare-pair", height=420)
            difference = result("Difference", "compare-difference", height=240)
    table = gr.HTML(elem_id="compare-table")
    filled = [pair, difference, status, table, start, cancel]
    connect_start([start.click], tab.run, [owner, one, other, *fields.components, *forms.loras], filled, status)
    clears_error(status, HINT, [*fields.components, one, other, *forms.loras])
    exchange.click(tab.reverse, [owner, one, other], [one, other, pair, table], show_progress="hidden")
    connect_cancel(cancel, state, owner)
    return tab, filled
