"""axe-core finds nothing serious on any tab, on a phone, a tablet and a desktop, by day and by night."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.breadth import first_of

from .actions import done, press, small, tab
from .looks import TABS

WINDOWS: dict[int, dict[str, Any]] = {
    390: {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
    768: {"viewport": {"width": 768, "height": 1024}},
    1280: {"viewport": {"width": 1280, "height": 900}},
}
CASES = [(width, scheme) for width in WINDOWS for scheme in ("light", "dark")]
GRAVE = ("serious", "critical")


def findings(page: Page) -> list[str]:
    """What axe-core calls serious or critical: the rule, and the first elements that break it."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: {[node['html'][:160] for node in each['nodes'][:4]]}"
        for each in found
        if each["impact"] in GRAVE
    ]


@pytest.mark.parametrize(("width", "scheme"), first_of(CASES, (390, "dark")))
def test_axe_finds_nothing_serious(opened: Any, width: int, scheme: Any) -> None:
    page = opened(color_scheme=scheme, **WINDOWS[width])
    found = {}
    for name in TABS:
        tab(page, name)
        found[name] = findings(page)
    assert [(name, each) for name, rules in found.items() for each in rules] == []


@pytest.mark.breadth
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nor_in_what_was_generated(opened: Any, scheme: Any) -> None:
    page = opened(color_scheme=scheme, **WINDOWS[390])
    small(page, steps=2)
    press(page, "image-generate")
    done(page, "image")
    assert findings(page) == []
    tab(page, "Timeline")
    expect(page.locator("#timeline-diagram svg path.wait")).to_have_count(2)
    assert findings(page) == []


@pytest.mark.breadth
def test_what_cannot_be_used_would_be_found(opened: Any) -> None:
    page = opened(**WINDOWS[390])
    page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<input><img src=\"data:,\">')")
    found = " ".join(findings(page))
    assert "image-alt" in found
    assert "label" in found
