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
from .job_tab import JobTab, buttons, connect_cancel, reports_refusal
from .state import PREPARE, AppState

IMAGE_MODELS = tuple(name for name in EMBEDDED if name != "embedded-face")
HINT = (
    "A name of the list, a folder on this machine, or a name of the hub such as org/model, which is downloaded. All "
    "pages then use it."
)
CANCELLED = "the model before it comes back when what is read or downloaded now has ended"


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error."""
    return html.failure(message), "", *buttons(None)


class ModelChooser(JobTab):
    """Event handlers."""

    kind = "model"

    def __init__(self, state: AppState, forms: Forms) -> None:
        super().__init__(state, show, failed)
        self._forms = forms

    def submit(self, owner: str, model: str) -> Job:
        """Queue the job. Raises PlanError for what is no model, and for one that does not fit into memory."""
        state = self._state
        setup = state.workers.setup_for(model)

        def work(job: Job) -> str:
            job.show(note=f"loading {model}")
            job.when_cancelled(lambda: job.show(note=f"cancelling {model}: {CANCELLED}", step=0))
            state.image_runner.change_model(job, setup)
            state.job_queue.forget("", PREPARE)  # pages that open would go on to say that the first model failed
            return model

        return self._queue(owner, work)

    @reports_refusal(failed)
    async def load(self, owner: str, model: str) -> AsyncIterator[Any]:
        """The button: (status, the model once it is loaded, both buttons)."""
        # Reads the files of the model, which must not block other pages.
        job = await asyncio.to_thread(self.submit, owner, (model or "").strip())
        async for update in self._updates(owner, job):
            yield update

    async def _resume(self, owner: str) -> AsyncIterator[Any]:
        """Of a model that has been loaded the heading says so: another page may have changed it since."""
        job = self._state.job_queue.job_of(owner, self.kind)
        async for update in self._updates(owner, None if job is not None and job.view.state == "done" else job):
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
        """Add the list, the buttons and the status line."""
        names = dict.fromkeys([self._state.workers.setup.model, *IMAGE_MODELS])
        with gr.Accordion("Model", open=False, elem_id="model"):
            with gr.Row(equal_height=True):
                self.chosen = gr.Dropdown(
                    [*names], allow_custom_value=True, label="Model", elem_id="model-name", scale=4
                )
                self.start = gr.Button("Load", elem_id="model-load", scale=1, min_width=100)
                self.cancel = gr.Button("Cancel", interactive=False, elem_id="model-cancel", scale=1, min_width=100)
            self.status = gr.HTML(html.notice(HINT), elem_id="model-status")

    def connect(self, page: gr.Blocks, owner: gr.State, title: gr.HTML) -> list[Any]:
        """Attach the handlers, once all fields are there. `title`: where the heading is. Returns those of `resume`."""
        self.loaded, self._titled = gr.State(""), [title, *self._forms.components]
        filled = [self.status, self.loaded, self.start, self.cancel]
        self.fill_after(self.start.click(self.load, [owner, self.chosen], filled, show_progress="hidden"))
        connect_cancel(self.cancel, self._state, owner)
        page.load(self.title, None, title, show_progress="hidden")
        return filled

    def fill_after(self, ended: Any) -> None:
        """Fill heading and fields after an event that has loaded a model."""
        ended.then(self.filled, self.loaded, self._titled, show_progress="hidden")


def heading(state: AppState) -> str:
    """The title of the page, and with what it generates."""
    setup = state.workers.setup
    line = f"One diffusion model on several devices. Here: the model {setup.model}, on {setup.devices.note}."
    return f"<header><h1>patchpar</h1>{html.caption(line)}</header>"


def show(view: JobView | None) -> tuple[Any, ...]:
    """Status, the model once it is loaded, both buttons."""
    if view is not None and view.state == "done":
        return html.notice(f"{view.result} is loaded."), view.result, *buttons(view)
    return html.status(view, HINT), "", *buttons(view)
