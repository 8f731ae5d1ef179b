"""Below the list of presets: what each would take for the fields as they are."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from . import html
from .fields import Fields
from .handler_errors import reports_errors
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons
from .preset_forecasts import HEAD, PresetForecasts, forecast_presets
from .requests import GenerateRequest
from .state import AppState


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error. The buttons stay: another job of the page may be running."""
    return html.failure(message), gr.skip(), gr.skip()


class ForecastPanel(JobTab):
    """Event handlers."""

    kind = "forecast"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, show, failed)

    def submit(self, owner: str, request: GenerateRequest) -> Job:
        """Queue the job. Raises PlanError."""
        return self._queue(owner, lambda job: forecast_presets(self._state.workers, job, request))

    @reports_errors(failed)
    async def forecast(self, owner: str, *fields: Any) -> AsyncIterator[Any]:
        """The button."""
        async for update in self._updates(owner, self.submit(owner, Fields.request(*fields))):
            yield update

    async def _resume(self, owner: str) -> AsyncIterator[Any]:
        """The table; the buttons, which are the tab's, only of a forecast that still runs."""
        job = self._state.job_queue.job_of(owner, self.kind)
        is_over = job is None or job.view.is_over
        async for table, *both in self._updates(owner, job):
            yield (table, gr.skip(), gr.skip()) if is_over else (table, *both)

    @reports_errors(lambda _: "")
    def ask(self, owner: str) -> str:
        """Whether there is a forecast to get back: an event of the page fills only what it needs."""
        return "" if self._state.job_queue.job_of(owner, self.kind) is None else "yes"

    def build(self) -> None:
        """Add the button and the table."""
        self.start = gr.Button("Forecast seconds, bytes and memory of presets", size="sm", elem_id="image-forecast")
        self.table = gr.HTML(elem_id="forecast-status")

    def connect(self, owner: gr.State, fields: Fields, start: gr.Button, cancel: gr.Button) -> None:
        """Attach the handlers. `start`, `cancel`: the tab's buttons, of which the second ends a forecast too."""
        filled, has_job = [self.table, start, cancel], gr.Textbox(visible="hidden")
        self.start.click(self.forecast, [owner, *fields.components], filled, show_progress="hidden")
        owner.change(self.ask, owner, has_job, show_progress="hidden")  # once a page knows its name
        has_job.change(self.resume, owner, filled, show_progress="hidden")


def show(view: JobView | None) -> tuple[Any, ...]:
    """Progress, then the table and what its numbers are; both buttons."""
    if view is None or view.state != "done":
        return html.status(view), *buttons(view)
    found: PresetForecasts = view.result
    return html.table(HEAD, found.rows, stacked=True) + html.notice(found.note), *buttons(view)
