"""The images of the page in the docs, taken anew; two minutes.

python -m tests.app.screenshots
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect

from .actions import TIMEOUT_MS, done, fill, press, tab
from .browser import REPOSITORY, installed, served, started

FOLDER = REPOSITORY / "assets" / "figures"
DESKTOP = {"width": 1280, "height": 900}
PAIR = {"width": 1280, "height": 870}  # without the table of seconds, which are those of a busy machine
PHONE = {"width": 390, "height": 844}
COLOURS = 256  # of an image in the docs, so that it is small


def save_screenshot(page: Page, name: str) -> None:
    """The window, as a small file."""
    path = FOLDER / f"{name}.png"
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)  # what moves has come to rest
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


def take_screenshots(browser: Any, address: str) -> None:
    """An image that was generated, by day; two that are compared, by night; what two ranks did, on a phone."""

    def opened(**options: Any) -> Page:
        page: Page = browser.new_context(**options).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(address)
        expect(page.locator("#image-generate")).to_be_enabled()
        expect(page.locator("#ready")).to_be_hidden()
        return page

    day = opened(viewport=DESKTOP, color_scheme="light")
    press(day, "image-generate")
    done(day, "image")
    save_screenshot(day, "app")

    night = opened(viewport=PAIR, color_scheme="dark")
    tab(night, "Compare")
    press(night, "compare-run")
    expect(night.locator("#compare-table table")).to_be_visible()
    save_screenshot(night, "app-compare")

    phone = opened(viewport=PHONE, color_scheme="light", is_mobile=True, has_touch=True, device_scale_factor=2)
    fill(phone, "Steps", 6)
    press(phone, "image-generate")
    done(phone, "image")
    tab(phone, "Timeline")
    expect(phone.locator("#timeline-diagram svg path.wait")).to_have_count(2)
    save_screenshot(phone, "app-phone")


if __name__ == "__main__":
    found = installed()
    if found is None:
        raise SystemExit("no Chromium here: apt-get install chromium, or make browser")
    expect.set_options(timeout=TIMEOUT_MS)
    with served() as app, started(found) as chromium:
        take_screenshots(chromium, app.address)
