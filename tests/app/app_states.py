"""What is behind a page, on workers that generate at once, and a client of the page without a browser."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

from app.feeds import Feeds
from app.image_runner import ImageJobRunner
from app.job_queue import JobQueue
from app.server import Address, application
from app.sessions import PageSessions
from app.state import AppState

from .fakes import FakePipeline, FakeWorkers


def state_of(workers: Any = None) -> AppState:
    """On these workers, or on two that generate at once. Whoever asks closes it."""
    workers, queue = workers or FakeWorkers(FakePipeline()), JobQueue()
    return AppState(workers, ImageJobRunner(workers), queue, PageSessions(queue), Feeds())


def client_of(state: AppState, address: Address | None = None) -> TestClient:
    """Asks for the page by the name that this machine has for itself."""
    return TestClient(application(state, address or Address()), base_url="http://127.0.0.1:7860")
