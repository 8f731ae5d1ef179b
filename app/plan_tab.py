"""The tab Plan: the plan for other numbers of devices, and what plans take on a machine."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from patchpar import PlanError
from patchpar.plan.link_model import LinkModel

from . import html
from .fields import Forms
from .forecast import MAX_DEVICES, MAX_PROMPTS, CallToPlan, forecast, link_estimate, plan_diagram
from .handler_errors import reports_errors
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons, connect_cancel
from .machine_plans import HEAD, MACHINES, MachinePlans, plans_on
from .requests import MAX_STEPS, as_whole, check_whole
from .state import AppState

NOT_YET = "The model is not loaded yet: try again when it is. An image that is generated loads it."


def failed(message: str) -> tuple[str, str, str]:
    """Outputs of `show` for an error."""
    return html.failure(message), "", ""


class PlanTab:
    """Event handlers of the tab."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    @reports_errors(failed)
    def show(self, devices: Any, width: Any, height: Any, guided: bool, prompts: Any) -> tuple[str, str, str]:
        """(chosen plan, its diagram, all plans)."""
        model = self._state.workers.model
        if model is None:
            return html.notice(NOT_YET), "", ""
        call = call_of(devices, width, height, guided, prompts)
        found = forecast(model, call)
        summary = html.pairs([("Plan", str(found.chosen)), ("Because", found.reason), ("Model", model.pipeline)])
        rows = [(str(offer.plan), offer.work, offer.refusal or "can be run") for offer in found.offers]
        table = html.table(("plan", "split", "result"), rows, marked=0)
        return summary, plan_diagram(found.chosen, model, (call.height, call.width)), table

    @reports_errors(html.failure)
    def estimate_link(self, owner: str, latency: Any, rate: Any) -> str:
        """What the page's last run would cost on a link of `latency` milliseconds and `rate` gigabytes per second."""
        if latency is None or rate is None:
            raise PlanError("fill in latency and rate of the link")
        link = LinkModel(latency=float(latency) / 1e3, rate=float(rate) * 1e9)
        return html.notice(link_estimate(self._state.job_queue.stored(owner, "run"), link))


def failed_machine(message: str) -> tuple[Any, ...]:
    """Outputs of a forecast for an error."""
    return html.failure(message), gr.skip(), gr.skip()


class MachinePanel(JobTab):
    """Event handlers of the forecast for a machine."""

    kind = "machine"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, lambda view: (show_machine(view), *buttons(view)), failed_machine)

    def submit(self, owner: str, machine: str, call: CallToPlan, steps: int) -> Job:
        """Queue the job. Raises PlanError."""
        check_whole("steps", steps, 1, MAX_STEPS)
        return self._queue(owner, lambda job: plans_on(self._state.workers, job, machine, call, steps))

    @reports_errors(failed_machine)
    async def forecast(self, owner: str, machine: str, steps: Any, *fields: Any) -> AsyncIterator[Any]:
        """The button. `fields`: width, height, and whether there is guidance."""
        width, height, guided = fields
        call = call_of(1, width, height, guided, 1)
        async for update in self._updates(owner, self.submit(owner, (machine or "").strip(), call, as_whole(steps))):
            yield update

    def build(self, owner: gr.State, forms: Forms, fields: list[Any]) -> list[Any]:
        """Add the machine, the steps, the buttons and the table. Returns the outputs of `resume`."""
        with gr.Row(equal_height=True):
            machine = gr.Dropdown(
                [*MACHINES], value=MACHINES[1], allow_custom_value=True, label="Machine", min_width=200, scale=3
            )
            steps = forms.add(gr.Number, lambda each: {"value": each.steps}, label="Steps", precision=0, min_width=90)
            start = gr.Button("Seconds and memory", min_width=150, elem_id="machine-run")
            cancel = gr.Button("Cancel", interactive=False, min_width=90, elem_id="machine-cancel")
        table = gr.HTML(elem_id="machine-status")
        filled = [table, start, cancel]
        start.click(self.forecast, [owner, machine, steps, *fields], filled, show_progress="hidden")
        connect_cancel(cancel, self._state, owner)
        return filled


def call_of(devices: Any, width: Any, height: Any, guided: Any, prompts: Any) -> CallToPlan:
    """The call that fields describe. Raises PlanError."""
    numbers = {"devices": devices, "width": width, "height": height, "prompts": prompts}
    return CallToPlan(**{name: as_whole(value) for name, value in numbers.items()}, guided=bool(guided))


def show_machine(view: JobView | None) -> str:
    """Progress, then the table and what its numbers are."""
    if view is None or view.state != "done":
        return html.status(view)
    found: MachinePlans = view.result
    return html.table(HEAD, found.rows, marked=0) + html.notice(found.note)


def build(
    state: AppState, owner: gr.State, forms: Forms
) -> tuple[PlanTab, list[Any], list[Any], tuple[MachinePanel, list[Any]]]:
    """Build the tab. Returns it, the inputs and outputs of `show`, and the panel with the outputs of its `resume`."""
    tab = PlanTab(state)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            devices = gr.Slider(1, MAX_DEVICES, 8, step=1, label="Devices")
            with gr.Row():
                width = forms.add(
                    gr.Number, lambda each: {"value": each.width}, label="Width", precision=0, min_width=120
                )
                height = forms.add(
                    gr.Number, lambda each: {"value": each.height}, label="Height", precision=0, min_width=120
                )
                prompts = gr.Slider(1, MAX_PROMPTS, 1, step=1, label="Prompts", min_width=120)
            guided = gr.Checkbox(True, label="With guidance")
            with gr.Row():
                start = gr.Button("Plan", variant="primary", elem_id="plan-run")
        with gr.Column(scale=6, min_width=320):
            summary = gr.HTML(html.notice("Plans of the loaded model for these devices."), elem_id="plan-summary")
            diagram = gr.HTML(elem_id="plan-diagram")
    table = gr.HTML(elem_id="plan-table")
    panel = MachinePanel(state)
    resumed = panel.build(owner, forms, [width, height, guided])
    with gr.Accordion("A slower link", open=False):
        with gr.Row():
            latency = gr.Number(0.05, label="Latency, milliseconds")
            rate = gr.Number(10.0, label="Rate, gigabytes per second")
            estimate_link = gr.Button("Estimate for the last run", elem_id="plan-estimate")
        estimate = gr.HTML(elem_id="plan-estimate-result")
    given, filled = [devices, width, height, guided, prompts], [summary, diagram, table]
    start.click(tab.show, given, filled, show_progress="hidden")
    estimate_link.click(tab.estimate_link, [owner, latency, rate], estimate, show_progress="hidden")
    return tab, given, filled, (panel, resumed)
