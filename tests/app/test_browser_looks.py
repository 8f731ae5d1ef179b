"""How what was generated looks on a phone, by day and by night.

Screenshots are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from .actions import done, press, small, status, tab
from .looks import FAINT, MIN_CONTRAST, PHONE, STICKS_OUT, check_looks


@pytest.mark.breadth
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_was_generated_fits_a_phone(opened: Any, scheme: Any) -> None:
    page = opened(color_scheme=scheme, **PHONE)
    small(page, steps=2)
    press(page, "image-generate")
    done(page, "image")
    check_looks(page, f"phone-{scheme}-image-done")
    tab(page, "Timeline")
    expect(page.locator("#timeline-diagram svg path.wait")).to_have_count(2)
    check_looks(page, f"phone-{scheme}-timeline-done")
    tab(page, "Compare")
    small(page, steps=2)
    press(page, "compare-run")
    expect(page.locator("#compare-table table")).to_be_visible()
    expect(status(page, "compare")).to_contain_text("SSIM")
    check_looks(page, f"phone-{scheme}-compare-done")


@pytest.mark.breadth
def test_what_cannot_be_read_would_be_seen(opened: Any) -> None:
    page = opened(**PHONE)
    page.add_style_tag(content=".caption { color: #aaa !important } main { min-width: 600px !important }")
    assert any("One diffusion model" in found for found in page.evaluate(FAINT, MIN_CONTRAST))
    assert any(found.startswith("main") for found in page.evaluate(STICKS_OUT))
