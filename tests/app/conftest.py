"""What is behind a page; a client, and a server and a browser for the tests that look at the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect

from app.jobs import JobQueue
from app.studio import AppState

from .browser import installed, served, started
from .hands import PATIENCE
from .studios import client_of, studio_of


@pytest.fixture
def desk() -> Iterator[JobQueue]:
    found = JobQueue()
    yield found
    found.close()


@pytest.fixture
def studio() -> Iterator[AppState]:
    with closing(studio_of()) as found:
        yield found


@pytest.fixture
def client(studio: AppState) -> Iterator[TestClient]:
    with client_of(studio) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Where the page is."""
    with served() as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of one file of tests: while it is open, a loop of asyncio runs in this thread, and no other can."""
    executable = installed()
    if executable is None:
        pytest.skip("no Chromium here: apt-get install chromium, or make browser")
    expect.set_options(timeout=PATIENCE)
    with started(executable) as found:
        yield found


@pytest.fixture
def opened(browser: Any, server: str) -> Iterator[Any]:
    """Opens a page as a person of its own; what a page says in its console as an error fails the test."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_page(**options: Any) -> Page:
        context = browser.new_context(permissions=["camera", "microphone"], **options)
        contexts.append(context)
        page: Page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server)
        expect(page.locator("#image-draw")).to_be_enabled()  # the page has been told what was under way
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
