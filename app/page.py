"""The page: its tabs, its colours, what happens when somebody comes and goes."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gradio as gr

from . import compare_tab, image_tab, large_tab, plan_tab, stream_tab, timeline_tab, words
from .answers import AnsweredBlocks, answered
from .defaults import defaults_before, defaults_of
from .fields import Forms
from .jobs import JobView
from .studio import AppState
from .visits import ASK_PAGE
from .watching import looked_at

STYLE = Path(__file__).with_name("style.css")
PURPOSE = "One diffusion model on several devices: draw, compare, and see what each of them did."
CACHE = (600, 3600)  # every so many seconds files older than that are deleted: previews, results, uploads
FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")  # nothing is fetched from anywhere


def theme() -> Any:
    """Plain, by day and by night."""
    plain = gr.themes.Base(
        primary_hue="teal", neutral_hue="slate", font=FONT, font_mono=("ui-monospace", "Menlo", "monospace")
    )
    return plain.set(
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_800",
        color_accent="*primary_700",
        color_accent_soft="*primary_50",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )


def build(studio: AppState) -> gr.Blocks:
    """The whole page."""
    with AnsweredBlocks(title="patchpar", analytics_enabled=False, delete_cache=CACHE, fill_width=True) as page:
        forms = Forms(defaults_before(studio.workers.setup.model))
        owner, asked = gr.State(""), gr.Textbox(visible="hidden")
        gr.HTML(_heading(studio))
        ready = gr.HTML(words.notice("Starting."), elem_id="ready")
        with gr.Tabs():
            with gr.Tab("Image"):
                image = image_tab.build(studio, owner, forms)
            with gr.Tab("Compare"):
                pair = compare_tab.build(studio, owner, forms)
            with gr.Tab("High resolution"):
                large = large_tab.build(studio, owner, forms)
            with gr.Tab("Stream"):
                stream = stream_tab.build(studio, owner, forms)
            with gr.Tab("Timeline") as shown:
                timeline, lanes = timeline_tab.build(studio, owner)
            with gr.Tab("Plan") as planned:
                plan, asked_for, answers = plan_tab.build(studio, owner, forms)
        shown.select(timeline.refresh, owner, lanes, show_progress="hidden")
        planned.select(plan.show, asked_for, answers, show_progress="hidden")
        _welcome(page, studio, owner, asked, (image, pair, large, stream))
        loaded = page.load(_Readiness(studio).show, None, ready, show_progress="hidden")
        loaded.then(_filling(studio, forms), forms.components, forms.components, show_progress="hidden")
    return page


def _heading(studio: AppState) -> str:
    setup = studio.workers.setup
    line = f"{PURPOSE} Here: the model {setup.model}, on {setup.devices.note}."
    return f"<header><h1>patchpar</h1>{words.caption(line)}</header>"


def _welcome(page: gr.Blocks, studio: AppState, owner: gr.State, asked: gr.Textbox, tabs: tuple[Any, ...]) -> None:
    """Who comes gets back what was under way; who goes leaves nothing behind."""

    @answered()
    def arrive(name: str, request: gr.Request) -> str:
        return studio.visits.arrive(str(request.session_hash), name)

    @answered()
    def leave(request: gr.Request) -> None:
        studio.visits.leave(str(request.session_hash))

    arrived = page.load(arrive, asked, owner, js=ASK_PAGE, show_progress="hidden")
    for tab, filled in tabs:
        arrived.then(tab.resume, owner, filled, show_progress="hidden")
    page.unload(leave)


def _filling(studio: AppState, forms: Forms) -> Callable[..., Any]:
    """The handler that gives the fields what the model, which has been loaded, has as its own."""

    @answered()
    def fill(*values: Any) -> list[Any]:
        workers = studio.workers
        return forms.filled(defaults_of(workers.setup.model, workers.model), values)

    return fill


class _Readiness:
    """How far the first job is: starting the workers."""

    def __init__(self, studio: AppState) -> None:
        self._studio = studio

    @answered(words.failure)
    async def show(self) -> AsyncIterator[Any]:
        """One line, until they are ready; then nothing."""
        async for line in looked_at(self._studio.desk.job_of("", "prepare"), _ready):
            yield line


def _ready(view: JobView | None) -> Any:
    is_ready = view is None or view.state == "done"
    return gr.update(value="" if is_ready else words.status(view), visible=not is_ready)
