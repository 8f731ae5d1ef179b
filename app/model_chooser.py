"""Another model for the page: an embedded one, a folder, or a name of the hub, loaded by a job like any other."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from patchpar.models.files import EMBEDDED

from . import html
from .defaults import defaults_of
from .fields import Forms
from .handler_errors import reports_errors
from .job_queue import Job, JobView
from .job_updates import updates_of
from .state import AppState

KIND = "model"
IMAGE_MODELS = tuple(name for name in EMBEDDED if name != "embedded-face")
HINT = (
    "A name of the list, a folder on this machine, or a name of the hub such as org/model, which is downloaded. All "
    "pages then use it."
)


class ModelChooser:
    """Event handlers."""

    def __init__(self, state: AppState, forms: Forms) -> None:
        self._state, self._forms = state, forms

    def submit(self, owner: str, model: str) -> Job:
        """Queue the job. Raises PlanError for what is no model, and for one that does not fit into memory."""
        state = self._state
        setup = state.workers.setup_for(model)

        def work(job: Job) -> str:
            job.show(note=f"loading {model}")
            state.workers.change(setup)
            state.image_runner.forget_colours()
            state.image_runner.prepare(job)
            return model

        return state.job_queue.submit(owner, KIND, work)

    @reports_errors(lambda message: (html.failure(message), ""))
    async def load(self, owner: str, model: str) -> AsyncIterator[tuple[str, str]]:
        """The button: (status, the model once it is loaded)."""
        # Reads the files of the model, which must not block other pages.
        job = await asyncio.to_thread(self.submit, owner, (model or "").strip())
        async for update in updates_of(job, _status):
            yield update

    @reports_errors()
    def title(self) -> str:
        """The heading, for a page that is opened after another model has been loaded."""
        return heading(self._state)

    @reports_errors()
    def filled(self, loaded: str) -> list[Any]:
        """Heading, and the fields with the defaults of a model that has been loaded."""
        if not loaded:
            return [gr.skip(), *[gr.skip() for _ in self._forms.components]]
        workers = self._state.workers
        return [heading(self._state), *self._forms.replaced(defaults_of(workers.setup.model, workers.model))]

    def build(self) -> None:
        """Add the list, the button and the status line."""
        names = dict.fromkeys([self._state.workers.setup.model, *IMAGE_MODELS])
        with gr.Accordion("Model", open=False, elem_id="model"):
            with gr.Row(equal_height=True):
                self.chosen = gr.Dropdown(
                    [*names], allow_custom_value=True, label="Model", elem_id="model-name", scale=4
                )
                self.start = gr.Button("Load", elem_id="model-load", scale=1, min_width=100)
            self.status = gr.HTML(html.notice(HINT), elem_id="model-status")

    def connect(self, page: gr.Blocks, owner: gr.State, title: gr.HTML) -> None:
        """Attach the handlers, once all fields are there. `title`: where the heading is."""
        loaded = gr.State("")
        ended = self.start.click(self.load, [owner, self.chosen], [self.status, loaded], show_progress="hidden")
        ended.then(self.filled, loaded, [title, *self._forms.components], show_progress="hidden")
        page.load(self.title, None, title, show_progress="hidden")


def heading(state: AppState) -> str:
    """The title of the page, and with what it generates."""
    setup = state.workers.setup
    line = f"One diffusion model on several devices. Here: the model {setup.model}, on {setup.devices.note}."
    return f"<header><h1>patchpar</h1>{html.caption(line)}</header>"


def _status(view: JobView | None) -> tuple[str, str]:
    if view is not None and view.state == "done":
        return html.notice(f"{view.result} is loaded."), view.result
    return html.status(view, HINT), ""
