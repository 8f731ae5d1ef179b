"""What is behind a page, on workers that draw at once, and a client of the page without a browser."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

from app.drawing import ImageJobRunner
from app.jobs import JobQueue
from app.live import Feeds
from app.server import Address, application
from app.studio import AppState
from app.visits import PageSessions

from .fakes import FakePipeline, FakeWorkers


def studio_of(workers: Any = None) -> AppState:
    """On these workers, or on two that draw at once. Whoever asks closes it."""
    workers, desk = workers or FakeWorkers(FakePipeline()), JobQueue()
    return AppState(workers, ImageJobRunner(workers), desk, PageSessions(desk), Feeds())


def client_of(studio: AppState, address: Address | None = None) -> TestClient:
    """Asks for the page by the name that this machine has for itself."""
    return TestClient(application(studio, address or Address()), base_url="http://127.0.0.1:7860")
