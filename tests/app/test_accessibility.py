"""axe-core finds nothing serious on any tab, on a phone, a tablet and a desktop, by day and by night."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from .actions import TIMEOUT_MS, done, press, small, tab
from .looks import LOOKS, PHONE, WINDOWS, every_tab

GRAVE = ("serious", "critical")
NAMED_MS = 400  # the page names new elements within 200


def findings(page: Page) -> list[str]:
    """What axe-core calls serious or critical: the rule, and the first elements that break it."""
    page.wait_for_timeout(NAMED_MS)
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: {[node['html'][:160] for node in each['nodes'][:4]]}"
        for each in found
        if each["impact"] in GRAVE
    ]


def unfold(page: Page) -> None:
    """Open all that is folded on the tab, so that axe-core sees it."""
    folded = page.locator("button.label-wrap:not(.open)").locator("visible=true")
    for _ in range(folded.count()):
        folded.first.click()
    expect(folded).to_have_count(0)


@pytest.mark.breadth
@pytest.mark.parametrize(("position", "scheme"), LOOKS)
def test_axe_finds_nothing_serious(browser: Any, address: str, position: str, scheme: Any) -> None:
    page = browser.new_context(color_scheme=scheme, **WINDOWS[position]).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(address)
    expect(page.locator("#image-generate")).to_be_enabled()
    small(page, steps=2)
    press(page, "image-generate")
    done(page, "image")
    found = {}
    for name, _ in every_tab(page):
        unfold(page)
        found[name] = findings(page)
    page.context.close()
    assert [(name, each) for name, rules in found.items() for each in rules] == []


@pytest.mark.breadth
def test_nor_in_what_real_workers_did(opened: Any) -> None:
    page = opened(color_scheme="dark", **PHONE)
    small(page, steps=2)
    press(page, "image-forecast")
    expect(page.locator("#forecast-status table")).to_be_visible(timeout=4 * TIMEOUT_MS)
    press(page, "image-generate")
    done(page, "image")
    assert findings(page) == []
    tab(page, "Timeline")
    expect(page.locator("#timeline-diagram svg path.wait")).to_have_count(2)
    assert findings(page) == []


@pytest.mark.breadth
def test_what_cannot_be_used_would_be_found(opened: Any) -> None:
    page = opened(**PHONE)
    page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<input><img src=\"data:,\">')")
    found = " ".join(findings(page))
    assert "image-alt" in found
    assert "label" in found
