"""The tab Plan: what would run on a cluster that is not here."""

from typing import Any

import gradio as gr

from patchpar import PlanError
from patchpar.plan.link_model import LinkModel

from . import words
from .answers import answered
from .fields import Forms
from .forecast import MOST_DEVICES, MOST_PROMPTS, PlannedCall, drawing, forecast, link_verdict
from .orders import as_whole
from .studio import AppState

NOT_YET = "The model is being loaded: try again in a moment."


def failed(sentence: str) -> tuple[str, str, str]:
    """What `show` fills, where something went wrong."""
    return words.failure(sentence), "", ""


class PlanTab:
    """What the tab does."""

    def __init__(self, studio: AppState) -> None:
        self._studio = studio

    @answered(failed)
    def show(self, devices: Any, width: Any, height: Any, guided: bool, prompts: Any) -> tuple[str, str, str]:
        """(the choice, its drawing, all plans)."""
        model = self._studio.workers.model
        if model is None:
            return words.notice(NOT_YET), "", ""
        numbers = {"devices": devices, "width": width, "height": height, "prompts": prompts}
        call = PlannedCall(**{name: as_whole(value) for name, value in numbers.items()}, guided=bool(guided))
        found = forecast(model, call)
        said = words.pairs([("Plan", str(found.chosen)), ("Because", found.reason), ("Model", model.pipeline)])
        rows = [(str(offer.plan), offer.work, offer.refusal or "can be run") for offer in found.offers]
        table = words.table(("plan", "who does what", "verdict"), rows, marked=0)
        return said, drawing(found.chosen, model, (call.height, call.width)), table

    @answered(words.failure)
    def weigh(self, owner: str, latency: Any, rate: Any) -> str:
        """What the page's last run would cost on a link of `latency` milliseconds and `rate` gigabytes per second."""
        if latency is None or rate is None:
            raise PlanError("fill in latency and rate of the link")
        link = LinkModel(latency=float(latency) / 1e3, rate=float(rate) * 1e9)
        return words.notice(link_verdict(self._studio.desk.kept(owner, "run"), link))


def build(studio: AppState, owner: gr.State, forms: Forms) -> tuple[PlanTab, list[Any], list[Any]]:
    """Lay the tab out. Returns it, what `show` is given, and what it fills."""
    tab = PlanTab(studio)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            devices = gr.Slider(1, MOST_DEVICES, 8, step=1, label="Devices")
            with gr.Row():
                width = forms.add(
                    gr.Number, lambda each: {"value": each.width}, label="Width", precision=0, min_width=120
                )
                height = forms.add(
                    gr.Number, lambda each: {"value": each.height}, label="Height", precision=0, min_width=120
                )
                prompts = gr.Slider(1, MOST_PROMPTS, 1, step=1, label="Prompts", min_width=120)
            guided = gr.Checkbox(True, label="Guidance is on")
            begin = gr.Button("Plan", variant="primary", elem_id="plan-run")
        with gr.Column(scale=6, min_width=320):
            said = gr.HTML(words.notice("What the loaded model would do there."), elem_id="plan-said")
            picture = gr.HTML(elem_id="plan-drawing")
    table = gr.HTML(elem_id="plan-table")
    with gr.Accordion("A slower link", open=False):
        with gr.Row():
            latency = gr.Number(0.05, label="Latency, milliseconds", minimum=0)
            rate = gr.Number(10.0, label="Rate, gigabytes per second", minimum=0)
            weigh = gr.Button("Weigh the last run", elem_id="plan-weigh")
        verdict = gr.HTML(elem_id="plan-verdict")
    given, filled = [devices, width, height, guided, prompts], [said, picture, table]
    begin.click(tab.show, given, filled, show_progress="hidden")
    weigh.click(tab.weigh, [owner, latency, rate], verdict, show_progress="hidden")
    return tab, given, filled
