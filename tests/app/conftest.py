"""A server and a browser for the tests that look at the page."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .browser import installed, started
from .hands import PATIENCE

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The command itself, on any free port; its address. Ctrl-C ends it and everything that it has started."""
    command = [sys.executable, "-m", "patchpar", "app", "--port", "0", "--devices", "cpu:2"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
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
