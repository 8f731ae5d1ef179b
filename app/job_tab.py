"""A tab whose button queues a job: its page follows the job, also after a reload."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar

import gradio as gr

from patchpar import PlanError

from .handler_errors import H, reports_errors
from .job_queue import Job, JobView
from .job_updates import changes_of, updates_of
from .state import AppState

Show = Callable[[JobView | None], Any]
UNKNOWN_PAGE = "the server does not know this page: it was started again, or has not heard of it for an hour. Reload it"


class JobTab:
    """Event handlers. `kind`: of the tab's jobs. `failed`: the outputs of `resume` for an error message."""

    kind: ClassVar[str]

    def __init__(self, state: AppState, show: Show, failed: Callable[[str], Any]) -> None:
        self._state, self._show = state, show
        self.resume = reports_errors(failed)(self._resume)
        """The page was reloaded: its last job of this tab."""

    def _queue(self, owner: str, work: Callable[[Job], Any]) -> Job:
        """Queue a job of this tab. Raises PlanError, also for a page that has lost its name, as any other would."""
        if not owner:
            raise PlanError(UNKNOWN_PAGE)
        return self._state.job_queue.submit(owner, self.kind, work)

    def _updates(self, owner: str, job: Job | None) -> AsyncIterator[Any]:
        """What changes of the tab's outputs with every change of the job; all of them once without one."""
        return changes_of(updates_of(job, self._show))

    async def _resume(self, owner: str) -> AsyncIterator[Any]:
        async for update in self._updates(owner, self._state.job_queue.job_of(owner, self.kind)):
            yield update


def reports_refusal(failed: Callable[[str], tuple[Any, ...]]) -> Callable[[H], H]:
    """Decorator of handlers that start a job. An error ends no job that is running: the buttons stay as they are."""
    return reports_errors(lambda message: tuple(_text_alone(each) for each in failed(message)))


def _text_alone(output: Any) -> Any:
    return output if isinstance(output, str) else gr.skip()


def connect_start(
    triggers: Sequence[Any], handler: Callable[..., Any], inputs: list[Any], outputs: list[Any], status: gr.HTML
) -> Any:
    """These events run `handler`, which shows its state itself. Returns the dependency, for what follows it.

    With each of its messages Gradio updates every component that it could show progress on, while the ranks compute:
    `status` stands for all outputs.
    """
    return gr.on(triggers, handler, inputs, outputs, show_progress="hidden", show_progress_on=[status])


def connect_cancel(cancel: gr.Button, state: AppState, owner: gr.State) -> None:
    """The button cancels the page's job."""
    cancel.click(reports_errors()(state.job_queue.cancel), owner, None, show_progress="hidden")


def buttons(view: JobView | None) -> tuple[Any, Any]:
    """Updates of the start and the cancel button: exactly one is enabled."""
    is_busy = view is not None and not view.is_over
    return gr.update(interactive=not is_busy), gr.update(interactive=is_busy)
