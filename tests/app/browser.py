"""A real browser to look at the page with: the system's Chromium, or the one that Playwright has fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

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


if __name__ == "__main__":
    raise SystemExit(installed() is None)
