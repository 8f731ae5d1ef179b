"""The tab Plan: plan forecast for other numbers of devices."""

from typing import Any

import gradio as gr

from patchpar import PlanError
from patchpar.plan.link_model import LinkModel

from . import html
from .fields import Forms
from .forecast import MAX_DEVICES, MAX_PROMPTS, CallToPlan, forecast, link_estimate, plan_diagram
from .handler_errors import reports_errors
from .requests import as_whole
from .state import AppState

NOT_YET = "The model is being loaded: try again in a moment."


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
        numbers = {"devices": devices, "width": width, "height": height, "prompts": prompts}
        call = CallToPlan(**{name: as_whole(value) for name, value in numbers.items()}, guided=bool(guided))
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


def build(state: AppState, owner: gr.State, forms: Forms) -> tuple[PlanTab, list[Any], list[Any]]:
    """Build the tab. Returns it, and the inputs and outputs of `show`."""
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
            start = gr.Button("Plan", variant="primary", elem_id="plan-run")
        with gr.Column(scale=6, min_width=320):
            summary = gr.HTML(html.notice("Plans of the loaded model for these devices."), elem_id="plan-summary")
            diagram = gr.HTML(elem_id="plan-diagram")
    table = gr.HTML(elem_id="plan-table")
    with gr.Accordion("A slower link", open=False):
        with gr.Row():
            latency = gr.Number(0.05, label="Latency, milliseconds", minimum=0)
            rate = gr.Number(10.0, label="Rate, gigabytes per second", minimum=0)
            estimate_link = gr.Button("Estimate for the last run", elem_id="plan-estimate")
        estimate = gr.HTML(elem_id="plan-estimate-result")
    given, filled = [devices, width, height, guided, prompts], [summary, diagram, table]
    start.click(tab.show, given, filled, show_progress="hidden")
    estimate_link.click(tab.estimate_link, [owner, latency, rate], estimate, show_progress="hidden")
    return tab, given, filled
