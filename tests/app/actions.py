"""What a person does on the page, and waits for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Download, Error, Page, Request, expect

SCREENSHOTS = Path(__file__).parent.parent.parent / "build" / "screenshots"
TIMEOUT_MS = 60_000  # milliseconds, on a busy machine
RETRY_MS = 2_000  # after which a click that nothing answered is made again
TRIES = 20


def retry_until(act: Callable[[], Any], condition: Callable[[float], Any]) -> None:
    """Act, and wait for the answer; act again where there is none soon.

    A page attaches what hears a click a moment after it shows what is clicked, and takes no second click on a button
    before the answer to the first has ended: such a click is lost. `answer` waits so many milliseconds, then raises.
    What is done here has to be harmless when it is done twice.
    """
    for _ in range(TRIES):
        act()
        try:
            condition(RETRY_MS)
        except (AssertionError, Error):
            continue
        return
    act()
    condition(TIMEOUT_MS)


def press(page: Page, name: str) -> None:
    """Click the button of this id, once it can be clicked, until the page has sent that to the server."""
    button = page.locator(f"#{name}")
    number = page.evaluate("name => window.gradio_config.components.find(each => each.props.elem_id === name).id", name)
    sent: list[Request] = []

    def record(request: Request) -> None:
        if request.url.split("?")[0].endswith("/queue/join") and request.post_data_json["trigger_id"] == number:
            sent.append(request)

    def click() -> None:
        if not sent:
            expect(button).to_be_enabled()
            button.click()

    page.on("request", record)
    try:
        retry_until(click, lambda timeout_ms: _something(page, sent, timeout_ms))
    finally:
        page.remove_listener("request", record)


def saved(page: Page, name: str) -> Download:
    """Click the button of this id, which saves something."""
    found: list[Download] = []

    def record(download: Download) -> None:
        found.append(download)

    page.on("download", record)
    try:
        retry_until(page.locator(f"#{name}").click, lambda timeout_ms: _something(page, found, timeout_ms))
    finally:
        page.remove_listener("download", record)
    return found[0]


def _something(page: Page, found: list[Any], timeout_ms: float) -> None:
    """Wait until there is something in the list."""
    for _ in range(int(timeout_ms / 50)):
        if found:
            return
        page.wait_for_timeout(50)
    raise AssertionError("nothing came")


def tab(page: Page, name: str) -> None:
    """Choose a tab, which a narrow page may have in its menu."""
    found = page.get_by_role("tab", name=name, exact=True).locator("visible=true")

    menu = page.locator(".overflow-menu > button").locator("visible=true").first

    def choose() -> None:
        if found.count():
            found.click()
        elif menu.count():  # neither is there while the page is being loaded
            menu.click()
            page.locator(f".overflow-dropdown button:has-text('{name}')").locator("visible=true").click()

    retry_until(choose, lambda timeout_ms: expect(found).to_have_attribute("aria-selected", "true", timeout=timeout_ms))


def fill(page: Page, label: str, value: object) -> None:
    """A number field, or the number beside a slider, of the tab that is shown."""
    field = page.locator(
        f"input[aria-label*='{label}'][type=number]:visible, label:has-text('{label}') input:visible"
    ).first
    field.fill(str(value))
    field.first.press("Tab")
    expect(field).to_have_value(str(value))


def small(page: Page, *, steps: int, side: int = 128) -> None:
    """An image that is generated soon."""
    fill(page, "Width", side)
    fill(page, "Height", side)
    fill(page, "Steps", steps)


def status(page: Page, name: str) -> Any:
    """The line that says how a tab's job stands."""
    return page.locator(f"#{name}-status .state")


def done(page: Page, name: str, *, timeout_ms: float = TIMEOUT_MS) -> None:
    """Wait for the end of a tab's job."""
    expect(status(page, name)).to_have_class(re.compile("done"), timeout=timeout_ms)


def sees(page: Page, position: str, width: int, height: int | None = None) -> None:
    """Wait for an image of this size in the element of this id: it is there a moment before it is loaded."""
    size = [width, width if height is None else height]
    page.wait_for_function(
        "([place, size]) => [...document.querySelectorAll(`#${place} img`)]"
        ".some((image) => image.naturalWidth === size[0] && image.naturalHeight === size[1])",
        arg=[position, size],
    )


def screenshot(page: Page, name: str) -> None:
    """A screenshot, to be looked at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
