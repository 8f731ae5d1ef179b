"""What `benchmarks.quality` measured as an image: quality against bytes, one point per method, as SVG."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.quality.records import ONE_PROCESS
from benchmarks.quality.table import Row

WIDTH, HEIGHT = 900, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 76, 64
EXACT_DB = 70.0
"""What is better is exact but for rounding: it stands on the upper edge, its figure written beside it."""
COLORS = {"displaced": "#c2571a", "pcpp": "#2e7d32", "fresh-edges": "#1f5fbf", "exact": "#222222"}
GREY = "#888888"
LETTER, LINE = 6.6, 15.0
"""Width of a letter and height of a line of the labels, pixels."""
OFFSETS = ((11, 4), (-11, 4), (11, -9), (11, 17), (-11, -9), (-11, 17), (11, -22), (11, 30), (-11, -22), (-11, 30))
"""Where a label may stand beside its point, best first; a negative x: it ends there."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the page, pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, across) * max(0.0, down)


@dataclass(frozen=True, slots=True)
class Scale:
    """From a range of values to a range of pixels, linear or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


PARTS_LEFT_OUT = ("extrapolated=false", "correction=none", "group_norm=", "quality=")
"""Options that vary a method or take a part of it away: tables have these rows, the image would be full of them."""
WARMUP = re.compile(r"[:,]warmup_steps=\d+")


def chosen(rows: Iterable[Row]) -> list[Row]:
    """The methods of one setting and number of ranks: of those with most methods, the one with most captions.

    Raises ValueError if there is none.
    """
    rows = [row for row in rows if not any(part in row.label for part in PARTS_LEFT_OUT)]
    groups = defaultdict(list)
    for row in rows:
        if row.method != ONE_PROCESS and row.bytes_per_step > 0:
            groups[row.setting, row.ranks].append(row)
    if not groups:
        raise ValueError("no method of this selection has been measured: leave flags out, or measure first")
    return max(groups.values(), key=lambda group: (len(group), sum(row.captions for row in group)))


def plot(rows: Iterable[Row]) -> str:
    """The image as SVG. Raises ValueError if there is nothing to show."""
    rows = chosen(rows)
    x, y = _scales(rows)
    points = [(x(row.bytes_per_step), y(min(row.psnr_db, y.high))) for row in rows]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_title(rows),
        *_axes(x, y),
        *(_marker(row, point) for row, point in zip(rows, points, strict=True)),
        *_labels(rows, points),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def write_plot(path: Path, rows: Iterable[Row]) -> None:
    """Write the image. Raises ValueError if there is nothing to show, or the file is not to be an SVG."""
    if path.suffix != ".svg":
        raise ValueError(f"{path} does not end with .svg: the image is one")
    text = plot(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _scales(rows: Sequence[Row]) -> tuple[Scale, Scale]:
    sent = [row.bytes_per_step for row in rows]
    displayed = [row.psnr_db for row in rows if row.psnr_db < EXACT_DB] or [EXACT_DB - 20]
    low, high = 10 * math.floor((min(displayed) - 2) / 10), 10 * math.ceil((max(displayed) + 5) / 10)
    x = Scale(min(sent) / 1.6, max(sent) * 1.6, LEFT, WIDTH - RIGHT, logarithmic=True)
    return x, Scale(low, high, HEIGHT - BOTTOM, TOP)


def _title(rows: Sequence[Row]) -> list[str]:
    counts = sorted({row.captions for row in rows})
    captions = "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    under = f"{rows[0].setting}, {rows[0].ranks} ranks, {captions} captions, embedded model"
    return [
        _text(LEFT, 28, "Quality against bytes", size=18),
        _text(LEFT, 48, under, color="#555555"),
    ]


def _axes(x: Scale, y: Scale) -> list[str]:
    lines = []
    for value in range(int(y.low), int(y.high) + 1, 10):
        lines += [_line(LEFT, y(value), WIDTH - RIGHT, y(value)), _text(LEFT - 8, y(value) + 4, str(value), "end")]
    for value in _ticks(x):
        lines.append(_line(x(value), TOP, x(value), HEIGHT - BOTTOM))
        lines.append(_text(x(value), HEIGHT - BOTTOM + 18, f"{value / 1e6:g}", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="rotate(-90 22 {middle:.0f})">'
    return [
        *lines,
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, "sent per step, rank and image, MB (logarithmic)", "middle"),
        turned + _text(22, middle, "PSNR to one process, dB", "middle") + "</g>",
    ]


def _ticks(scale: Scale) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    steps = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [step for step in steps if scale.low <= step <= scale.high]


def _color(row: Row) -> str:
    return GREY if row.method.exchange != "on" else COLORS.get(row.label.partition(":")[0], "#7b3fa0")


def _marker(row: Row, point: tuple[float, float]) -> str:
    """A disc; a ring for what is not meant to be good."""
    control = row.method.exchange != "on"
    fill = "white" if control else _color(row)
    return (
        f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="5" fill="{fill}" stroke="{_color(row)}" stroke-width="2"/>'
    )


def _labels(rows: Sequence[Row], points: Sequence[tuple[float, float]]) -> list[str]:
    """The methods' names, each where it covers least of what is there already."""
    taken = [Box(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    lines = []
    for text, row, (x, y) in zip(_names(rows), rows, points, strict=True):
        dx, dy = min(OFFSETS, key=lambda offset: _covered(_box(text, x + offset[0], y + offset[1], offset[0]), taken))
        taken.append(_box(text, x + dx, y + dy, dx))
        lines.append(_text(x + dx, y + dy, text, "start" if dx > 0 else "end", color=_color(row)))
    return lines


def _names(rows: Sequence[Row]) -> Iterator[str]:
    """What stands beside the points: how many steps are exact only where methods differ by nothing else."""
    short = [row.published_as or WARMUP.sub("", row.label) for row in rows]
    times = Counter(short)
    for name, row in zip(short, rows, strict=True):
        steps = f", {row.exact_steps:.3g} exact" if times[name] > 1 else ""
        figure = f" ({row.psnr_db:.0f} dB)" if row.psnr_db >= EXACT_DB else ""
        control = " (control)" if row.method.exchange != "on" else ""
        yield name + steps + control + figure


def _box(text: str, x: float, y: float, dx: float) -> Box:
    left = x if dx > 0 else x - LETTER * len(text)
    return Box(left, y - LINE + 3, left + LETTER * len(text), y + 3)


def _covered(box: Box, taken: Sequence[Box]) -> float:
    """Area of others that it covers; what lies outside the page counts most."""
    outside = max(0.0, LEFT - box.left) + max(0.0, box.right - (WIDTH - 4)) + max(0.0, TOP - 16 - box.top)
    return 1e3 * outside + sum(box.overlap(other) for other in taken)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12, color: str = "#222222") -> str:
    looks = f'text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {looks}>{escape(text)}</text>'
