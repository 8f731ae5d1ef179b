"""What is behind a page; a client, and a server and a browser for the tests that look at the page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect

from app.job_queue import JobQueue
from app.server import Address, application
from app.state import AppState
from patchpar.web.server import WebServer
from tests.cli.our_lines import foreign

from .actions import TIMEOUT_MS
from .app_states import client_of, state_of
from .browser import ServedApp, installed, served, started
from .fakes import FakePipeline, FakeWorkers


@pytest.fixture
def queue() -> Iterator[JobQueue]:
    found = JobQueue()
    yield found
    found.close()


@pytest.fixture
def state() -> Iterator[AppState]:
    with closing(state_of()) as found:
        yield found


@pytest.fixture
def client(state: AppState) -> Iterator[TestClient]:
    with client_of(state) as found:
        yield found


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server has its temporary files."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def server(scratch: Path) -> Iterator[ServedApp]:
    """What it writes to stderr meanwhile is its own."""
    path = scratch / "stderr.txt"
    with path.open("w") as file, served({**os.environ, "TMPDIR": str(scratch)}, file) as app:
        yield app
    assert foreign(path.read_text()) == []


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the page on workers that generate at once: what it looks like and obeys does not depend on them."""
    workers = FakeWorkers(FakePipeline())
    workers.may_change = True  # so that the list of models is there
    workers.setup = replace(workers.setup, face="embedded-face")  # and the fields of a talking face
    with closing(state_of(workers)) as state, closing(WebServer("127.0.0.1", 0, "--port")) as server:
        server.serve(application(state, Address()))
        yield server.url
        server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of one file of tests: while it is open, a loop of asyncio runs in this thread, and no other can."""
    executable = installed()
    if executable is None:
        pytest.skip("no Chromium here: apt-get install chromium, or make browser")
    expect.set_options(timeout=TIMEOUT_MS)
    with started(executable) as found:
        yield found


@pytest.fixture
def opened(browser: Any, server: ServedApp) -> Iterator[Any]:
    """Opens a page as a person of its own; what a page says in its console as an error fails the test."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_page(script: str = "", **options: Any) -> Page:
        context = browser.new_context(permissions=["camera", "microphone"], **options)
        contexts.append(context)
        context.add_init_script(script)
        page: Page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.address)
        expect(page.locator("#image-generate")).to_be_enabled()  # the page has been told what was under way
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
