"""How every tab looks by day and by night, on a desktop and on a phone: nothing sticks out, all of it can be read.

Screenshots are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.breadth import first_of

from .actions import done, press, screenshot, small, status, tab

TABS = ("Image", "Compare", "High resolution", "Stream", "Timeline", "Plan")
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
WINDOWS = {"desktop": DESKTOP, "phone": PHONE}
LOOKS = [(place, scheme) for place in WINDOWS for scheme in ("light", "dark")]
MIN_CONTRAST = 4.5  # WCAG 2.2, level AA, for text of ordinary size

STICKS_OUT = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  return [...document.querySelectorAll("body *")].filter((e) => {
    const place = e.getBoundingClientRect();
    const isOut = place.right > width + 1 || place.left < -1;
    return place.width && place.height && isOut && !e.closest(".visually-hidden") && !scrolls(e.parentElement);
  }).map((e) => `${e.tagName.toLowerCase()}#${e.id}.${e.className}`);
}"""
"""What a narrow window cuts off, or has to be moved sideways for; what scrolls within itself may be wider."""

FAINT = """(least) => {
  const parts = (colour) => (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = ([r, g, b, a = 1], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const behind = (e) => {
    if (!e) return [255, 255, 255];
    const own = parts(getComputedStyle(e).backgroundColor);
    return own[3] === undefined ? own : own[3] === 0 ? behind(e.parentElement) : over(own, behind(e.parentElement));
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const says = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && /[\\p{L}\\p{N}]/u.test(n.textContent));
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    if (!says(e) || !e.checkVisibility({checkVisibilityCSS: true, opacityProperty: true})) continue;
    if (e.closest("script, style, button:disabled, [aria-disabled=true], .visually-hidden")) continue;
    const style = getComputedStyle(e), back = behind(e.ownerSVGElement || e);
    const ink = over(parts(e.ownerSVGElement ? style.fill : style.color), back);
    const [low, high] = [light(ink), light(back)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least) found.push(`${e.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""
"""Texts that stand out too little from what is behind them, with by how much."""


def check_looks(page: Page, name: str) -> None:
    screenshot(page, name)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("window.innerWidth")
    assert page.evaluate(STICKS_OUT) == [], name
    assert page.evaluate(FAINT, MIN_CONTRAST) == [], name


@pytest.mark.parametrize(("place", "scheme"), first_of(LOOKS, ("phone", "dark")))
def test_every_tab_can_be_read(opened: Any, place: str, scheme: Any) -> None:
    page = opened(color_scheme=scheme, **WINDOWS[place])
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    expect(page.locator("#ready")).to_be_hidden()  # until then there is nothing to plan for
    for name in TABS:
        tab(page, name)
        if name == "Plan":
            expect(page.locator("#plan-table table")).to_be_visible()
        check_looks(page, f"{place}-{scheme}-{name.lower().replace(' ', '-')}")


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


def test_what_cannot_be_read_would_be_seen(opened: Any) -> None:
    page = opened(**PHONE)
    page.add_style_tag(content=".caption { color: #aaa !important } main { min-width: 600px !important }")
    assert any("One diffusion model" in found for found in page.evaluate(FAINT, MIN_CONTRAST))
    assert any(found.startswith("main") for found in page.evaluate(STICKS_OUT))
