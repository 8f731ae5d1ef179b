"""What every diagram is made of: boxes, words, lines and arrows as SVG, and the style that they share.

A diagram brings its own background, so that it can be read on any page; its colours follow the reader's preference for
light or dark. Places are told apart by colours that people who see few colours can tell apart too (Okabe and Ito).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from xml.sax.saxutils import escape

FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"
MARGIN = 24
LETTER = 0.56
"""Width of a letter of this font, in units of its size: an upper estimate of the mean."""
LIGHT = {
    "paper": "fill:#ffffff;stroke:#d5dae2",
    "ink": "fill:#1f2630",
    "soft": "fill:#5a6472",
    "box": "fill:#f0f3f7;stroke:#9aa4b2",
    "none": "fill:none;stroke:#9aa4b2;stroke-dasharray:3 3",
    "rule": "stroke:#9aa4b2;fill:none",
    "now": "stroke:#c2471a;fill:none;stroke-width:2",
    "old": "stroke:#5a6472;fill:none;stroke-width:2;stroke-dasharray:5 4",
    "nowtip": "fill:#c2471a",
    "oldtip": "fill:#5a6472",
}
DARK = {
    "paper": "fill:#161b22;stroke:#39424e",
    "ink": "fill:#e8edf3",
    "soft": "fill:#a3adba",
    "box": "fill:#252c36;stroke:#6b7684",
    "none": "fill:none;stroke:#6b7684;stroke-dasharray:3 3",
    "rule": "stroke:#6b7684;fill:none",
    "now": "stroke:#ff9466;fill:none;stroke-width:2",
    "old": "stroke:#a3adba;fill:none;stroke-width:2;stroke-dasharray:5 4",
    "nowtip": "fill:#ff9466",
    "oldtip": "fill:#a3adba",
}
EITHER = {
    "rank0": "fill:#56a6dd",
    "rank1": "fill:#e8a33d",
    "rank2": "fill:#3fb08f",
    "rank3": "fill:#d08bb5",
    "rank4": "fill:#c9c04a",
    "on": "fill:#14202b",
    "edge": "fill:url(#hatch)",
}
RANK_STYLES = 5


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle on the page, pixels."""

    x: float
    y: float
    w: float
    h: float

    @property
    def middle(self) -> tuple[float, float]:
        """Its centre."""
        return self.x + self.w / 2, self.y + self.h / 2


def rank_style(number: int) -> str:
    """The look of a place on an axis, or of a block of a stream."""
    return f"rank{number % RANK_STYLES}"


def box(at: Rect, look: str, words: str = "", size: float = 13, *, faint: bool = False) -> str:
    """A rectangle with words in its middle; lines of words are parted by newlines."""
    opacity = ' opacity="0.4"' if faint else ""
    rect = f'<rect class="{look}" x="{at.x:g}" y="{at.y:g}" width="{at.w:g}" height="{at.h:g}" rx="3"{opacity}/>'
    if not words:
        return rect
    x, y = at.middle
    lines = words.split("\n")
    first = y - (len(lines) - 1) * size * 0.62 + size * 0.35
    inside = "on" if look.startswith("rank") else "ink"
    return rect + "".join(
        text(x, first + number * size * 1.24, line, look=inside, anchor="middle", size=size)
        for number, line in enumerate(lines)
    )


def text(x: float, y: float, words: str, *, look: str = "ink", anchor: str = "start", size: float = 13) -> str:
    """One line of words, its baseline at `y`."""
    return (
        f'<text class="{look}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}">{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, look: str = "rule") -> str:
    """A straight line."""
    return f'<line class="{look}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, look: str = "now", *, both: bool = False) -> str:
    """What travels: `now` is waited for in this step, `old` is used in the next."""
    begin = f' marker-start="url(#{look}-tip)"' if both else ""
    return (
        f'<line class="{look}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{begin} marker-end="url(#{look}-tip)"/>'
    )


def page(size: tuple[int, int], title: str, parts: Iterable[str]) -> str:
    """The whole diagram, `size` in pixels; `title` is said to who cannot see it."""
    width, height = size
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="{FONT}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_rules(LIGHT | EITHER)}@media (prefers-color-scheme: dark){{{_rules(DARK)}}}</style>",
            "<defs>" + "".join(_tip(look) for look in ("now", "old")) + HATCH + "</defs>",
            f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        )
    )


HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#ffffff" opacity="0.55"/><line x1="0" y1="0" x2="0" y2="6" stroke="#14202b" '
    'stroke-width="2.4"/></pattern>'
)


def _rules(looks: dict[str, str]) -> str:
    return "".join(f".{name}{{{rule}}}" for name, rule in looks.items())


def _tip(look: str) -> str:
    return (
        f'<marker id="{look}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
        f'<path class="{look}tip" d="M0 0L8 4L0 8z"/></marker>'
    )
