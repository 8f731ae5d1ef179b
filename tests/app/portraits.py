"""The pictures of the page in the docs, taken anew; two minutes.

python -m tests.app.portraits
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect

from .browser import REPOSITORY, installed, served, started
from .hands import PATIENCE, done, fill, press, tab

FOLDER = REPOSITORY / "assets" / "figures"
DESK = {"width": 1280, "height": 900}
PAIR = {"width": 1280, "height": 870}  # without the table of seconds, which are those of a busy machine
PHONE = {"width": 390, "height": 844}
COLOURS = 256  # of a picture in the docs, so that it is small


def taken(page: Page, name: str) -> None:
    """The window, as a small file."""
    path = FOLDER / f"{name}.png"
    page.wait_for_timeout(500)  # what moves has come to rest
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


def take(browser: Any, address: str) -> None:
    """A picture that was drawn, by day; two that are compared, by night; what two ranks did, on a phone."""

    def opened(**options: Any) -> Page:
        page: Page = browser.new_context(**options).new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        expect(page.locator("#image-draw")).to_be_enabled()
        expect(page.locator("#ready")).to_be_hidden()
        return page

    day = opened(viewport=DESK, color_scheme="light")
    press(day, "image-draw")
    done(day, "image")
    taken(day, "app")

    night = opened(viewport=PAIR, color_scheme="dark")
    tab(night, "Compare")
    press(night, "compare-run")
    expect(night.locator("#compare-table table")).to_be_visible()
    taken(night, "app-compare")

    phone = opened(viewport=PHONE, color_scheme="light", is_mobile=True, has_touch=True, device_scale_factor=2)
    fill(phone, "Steps", 6)
    press(phone, "image-draw")
    done(phone, "image")
    tab(phone, "Timeline")
    expect(phone.locator("#timeline-drawing svg path.wait")).to_have_count(2)
    taken(phone, "app-phone")


if __name__ == "__main__":
    found = installed()
    if found is None:
        raise SystemExit("no Chromium here: apt-get install chromium, or make browser")
    expect.set_options(timeout=PATIENCE)
    with served() as where, started(found) as chromium:
        take(chromium, where)
