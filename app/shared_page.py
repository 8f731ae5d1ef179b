"""The page on a server of images: one process, one queue, the same workers."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from patchpar import ParallelPipeline
from patchpar.models.task import purpose_of

from .job_queue import Job, JobQueue
from .origin import OwnRequests
from .server import Address, add_page
from .state import AppState
from .workers import TASK, AppConfig, AppWorkers

PATH = "/app"


class SharedPage:
    """The page at /app. `append` puts a job into the server's queue; `pipeline` returns the server's open pipeline."""

    def __init__(
        self,
        setup: AppConfig,
        address: Address,
        append: Callable[[Callable[[Job], Any]], Job],
        pipeline: Callable[[], ParallelPipeline],
    ) -> None:
        self._address, self._pipeline = address, pipeline
        self.state = AppState.sharing(AppWorkers(setup, pipeline), JobQueue.sharing(append))

    def add_to(self, app: FastAPI) -> None:
        """Add the page, before the application starts."""
        app.add_middleware(OwnRequests, prefix=PATH)
        add_page(app, self.state, self._address, PATH)

    def begin(self) -> None:
        """Prepare the page, once the model is loaded. Raises PlanError for one that the page cannot call."""
        TASK.check(purpose_of(self._pipeline().description.pipeline))  # of the hub it is known only now
        self.state.prepare()

    def close(self) -> None:
        """End what the page has of its own. Idempotent."""
        self.state.close()
