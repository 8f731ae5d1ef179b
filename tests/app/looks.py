"""What is checked of how the page looks: nothing sticks out, all of it can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Page

from .actions import screenshot, tab

STARTS: dict[str, dict[str, str | None]] = {
    "Image": {"": "image-generate"},
    "Edit": {"": "edit-run"},
    "Compare": {"": "compare-run"},
    "High resolution": {"From a prompt": "high-res-run", "From an image": "upscale-run"},
    "Video": {"": "video-run"},
    "Stream": {"Images": "stream-run", "Talking face": "stream-talk"},
    "Timeline": {"": None},
    "Plan": {"": "plan-run"},
}
"""By tab, and by the tabs in it: the button that starts a run."""
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
TABLET: dict[str, Any] = {"viewport": {"width": 768, "height": 1024}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
WINDOWS = {"desktop": DESKTOP, "tablet": TABLET, "phone": PHONE}
LOOKS = [(position, scheme) for position in WINDOWS for scheme in ("light", "dark")]
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


def every_tab(page: Page) -> Iterator[tuple[str, str | None]]:
    """Open each tab, and each tab in it: its name, and the button that starts a run."""
    for outer, inner in STARTS.items():
        tab(page, outer)
        for name, button in inner.items():
            if name:
                tab(page, name)
            yield f"{outer} {name}".strip(), button


def check_looks(page: Page, name: str) -> None:
    screenshot(page, name)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("window.innerWidth")
    for unreadable in (page.evaluate(STICKS_OUT), page.evaluate(FAINT, MIN_CONTRAST)):
        assert unreadable == [], f"{name}: {unreadable}"
