"""The page: tabs, theme, page load and unload."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr

from . import (
    compare_tab,
    edit_tab,
    event_stream,
    high_res_tab,
    html,
    image_tab,
    plan_tab,
    stream_tab,
    timeline_tab,
    video_tab,
)
from .blocks import PageBlocks
from .defaults import Defaults, defaults_before, defaults_of
from .fields import Forms
from .handler_errors import reports_errors
from .history_panel import HISTORY_OUTPUTS
from .job_queue import JobView
from .job_updates import updates_of
from .lora_fields import lora_fields
from .model_chooser import ModelChooser, heading
from .sessions import PAGE_NAME_JS
from .state import PREPARE, AppState

STYLE = Path(__file__).with_name("style.css")
YES = "yes"
OPENING_JS = """(found) => {
  const kinds = KINDS, has = kinds.map((kind) => found.split(",").includes(kind));
  const update = (number) => has[number] ? {__type__: "update"} : {__type__: "update", interactive: true};
  return [...BUTTONS.map(update), ...has.map((each) => each ? "yes" : "")];
}"""
"""Enables the buttons that start a run, of tabs that have nothing to get back; tells the others to get it."""
CACHE = (600, 3600)  # seconds: how often files are deleted, and from which age: previews, results, uploads
FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")  # no font is downloaded


def theme() -> Any:
    """A plain theme, light and dark."""
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


def build(state: AppState) -> gr.Blocks:
    """The whole page."""
    with PageBlocks(title="patchpar", analytics_enabled=False, delete_cache=CACHE, fill_width=True) as page:
        forms = Forms(defaults_before(state.workers.setup.model), lambda: _known(state))
        owner, page_name, found, has_others = gr.State(""), *(gr.Textbox(visible="hidden") for _ in range(3))
        title = gr.HTML(heading(state))
        chooser = ModelChooser(state, forms) if state.workers.may_change else None
        if chooser is not None:
            chooser.build()
            forms.loras += lora_fields()
        ready = gr.HTML(html.notice("Starting."), elem_id="ready")
        with gr.Tabs():
            with gr.Tab("Image") as first:
                image = image_tab.build(state, owner, forms)
            with gr.Tab("Edit"):
                edited = edit_tab.build(state, owner, forms)
            with gr.Tab("Compare"):
                pair = compare_tab.build(state, owner, forms)
            with gr.Tab("High resolution"):
                high_res = high_res_tab.build(state, owner, forms)
            videos = _video_tab(state, owner)
            with gr.Tab("Stream"):
                stream = stream_tab.build(state, owner, forms)
            with gr.Tab("Timeline") as update:
                timeline, lanes = timeline_tab.build(state, owner)
            with gr.Tab("Plan") as planned:
                plan, plan_inputs, plan_outputs, machine = plan_tab.build(state, owner, forms)
        first.select(image[0].history.refresh, owner, image[1][-HISTORY_OUTPUTS:], show_progress="hidden")
        update.select(timeline.refresh, owner, lanes, show_progress="hidden")
        planned.select(plan.show, plan_inputs, plan_outputs, show_progress="hidden")
        connected = _welcome(page, state, [page_name], [owner, found])
        models = [] if chooser is None else [(chooser, chooser.connect(page, owner, title))]
        resumed = _resume(connected, owner, found, (image, edited, pair, high_res, *videos, stream, machine, *models))
        if chooser is not None:
            chooser.fill_after(resumed[-1])
        _follow_loading(page, state, forms, ready, has_others)
    return page


def _video_tab(state: AppState, owner: gr.State) -> list[Any]:
    """Add it where pages may name any folder or model of the hub."""
    if not state.workers.may_change:
        return []
    with gr.Tab("Video"):
        return [video_tab.build(state, owner)]


def _welcome(page: gr.Blocks, state: AppState, named: list[Any], filled: list[Any]) -> Any:
    """A page that connects keeps its job; one that disconnects loses it after a grace period.

    `filled`: with the name of the page, and the tabs that have something to get back. Returns the event.
    """

    @reports_errors()
    def connect(name: str, request: gr.Request) -> tuple[str, str]:
        owner = state.sessions.connect(str(request.session_hash), name)
        return owner, ",".join(state.kinds_of(owner))

    @reports_errors()
    def disconnect(request: gr.Request) -> None:
        state.sessions.disconnect(str(request.session_hash))

    page.unload(disconnect)
    event_stream.build()
    return page.load(connect, named, filled, js=PAGE_NAME_JS, show_progress="hidden")


def _resume(connected: Any, owner: gr.State, found: gr.Textbox, tabs: tuple[Any, ...]) -> list[Any]:
    """Tabs get their last jobs back, and only those that have one are filled. Returns the events that do it.

    With each message of a job the browser updates all that an event of the page has ever filled. An event without a
    handler on the server does not count.
    """
    has_job = [gr.Textbox(visible="hidden") for _ in tabs]
    starts = [
        (number, each)
        for number, (_, filled) in enumerate(tabs)
        for each in filled
        if getattr(each, "variant", "") == "primary"
    ]
    kinds, numbers = json.dumps([tab.kind for tab, _ in tabs]), json.dumps([number for number, _ in starts])
    js = OPENING_JS.replace("KINDS", kinds).replace("BUTTONS", numbers)
    connected.then(None, found, [*(each for _, each in starts), *has_job], js=js, show_progress="hidden")
    return [
        box.change(tab.resume, owner, filled, show_progress="hidden")
        for box, (tab, filled) in zip(has_job, tabs, strict=True)
    ]


def _follow_loading(page: gr.Blocks, state: AppState, forms: Forms, ready: gr.HTML, has_others: gr.Textbox) -> None:
    """Show how the model is loaded. Then the fields get its defaults, if it has others than they have at first."""

    @reports_errors()
    def ask() -> str:
        return "" if forms.has_defaults_of(_known(state)) else YES

    @reports_errors()
    def fill(*values: Any) -> list[Any]:
        return forms.filled(_known(state), values)

    loaded = page.load(_Readiness(state).show, None, ready, show_progress="hidden")
    loaded.then(ask, None, has_others, show_progress="hidden")
    has_others.change(fill, forms.components, forms.components, show_progress="hidden")


def _known(state: AppState) -> Defaults:
    """Those of the model that is loaded."""
    return defaults_of(state.workers.setup.model, state.workers.model)


class _Readiness:
    """Progress of the first job, which starts the workers."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    @reports_errors(html.failure)
    async def show(self) -> AsyncIterator[Any]:
        """A status line until the workers are ready, then nothing."""
        async for line in updates_of(self._state.job_queue.job_of("", PREPARE), _ready):
            yield line


def _ready(view: JobView | None) -> Any:
    is_ready = view is None or view.state == "done"
    return gr.update(value="" if is_ready else html.status(view), visible=not is_ready)
