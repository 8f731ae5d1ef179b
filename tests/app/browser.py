"""The page as the command serves it, and a real browser to look at it: the system's Chromium, or Playwright's own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

REPOSITORY = Path(__file__).parent.parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",  # containers often run as root
    "--disable-dev-shm-usage",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
)


def installed() -> str | None:
    """Where a Chromium is, or None."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
    return str(own) if own.exists() else None


@contextmanager
def started(executable: str) -> Iterator[Any]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*FLAGS])
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApp:
    """A running `patchpar app`, the first of its process group, and where it serves the page."""

    process: subprocess.Popen[str]
    address: str

    def end(self, number: signal.Signals) -> int:
        """Send a signal that ends it. Returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def is_there(self) -> bool:
        """Whether it, or a worker of it, has not ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 0)
            return True
        return False


@contextmanager
def served(
    variables: Mapping[str, str] = os.environ, stderr: Any = None, *, devices: str = "cpu:2"
) -> Iterator[ServedApp]:
    """The command itself, on any free port. Ctrl-C ends it and all that it has started, unless the block has.

    `stderr`: a file for what it says there.
    """
    command = [sys.executable, "-m", "patchpar", "app", "--port", "0", "--devices", devices]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=pipe, stderr=stderr, text=True, start_new_session=True, env={**variables}
    )
    try:
        assert process.stdout is not None
        found = next((line for line in process.stdout if "http://" in line), "")
        app = ServedApp(process=process, address=re.findall(r"http://\S+", found)[0])
        yield app
        if process.poll() is None:
            assert app.end(signal.SIGINT) == 130, "as other commands after ctrl-C"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


if __name__ == "__main__":
    raise SystemExit(installed() is None)
