"""The page as the command serves it, and a real browser to look at it: the system's Chromium, or Playwright's own."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def served() -> Iterator[str]:
    """The command itself, on any free port; its address. Ctrl-C ends it and everything that it has started."""
    command = [sys.executable, "-m", "patchpar", "app", "--port", "0", "--devices", "cpu:2"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        found = next((line for line in process.stdout if "http://" in line), "")
        yield re.findall(r"http://\S+", found)[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, "as other commands after ctrl-C"
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    raise SystemExit(installed() is None)
