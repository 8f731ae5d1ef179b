"""The plot of `patchpar bench`: PSNR against bytes per step, one numbered point per plan, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from patchpar.cli.bench.table import BenchRow, decibels

WIDTH, HEIGHT = 960, 420  # pixels, of the plot of one setting with few plans
LEFT, RIGHT, TOP, BOTTOM = 70, 400, 54, 56  # margins; the names of the plans are in that on the right
TOP_DB = 80.0
"""What is better differs by rounding only: its point is at the upper edge."""
COLORS = ("#1f5fbf", "#c2571a", "#2e7d32", "#7b3fa0", "#a8323e", "#22707a")
LINE = 18.0
"""Pixels between the names of two plans."""


class Point(NamedTuple):
    """Where a row is, pixels, its number and its color."""

    row: BenchRow
    number: int
    x: float
    y: float
    color: str


def plot(rows: Sequence[BenchRow]) -> str:
    """Return one plot per setting, one below the other, as SVG. Rows without traffic are at the left edge."""
    lines, top = list[str](), 0.0
    for setting in dict.fromkeys(row.setting for row in rows):
        of_setting = [row for row in rows if row.setting == setting]
        lines += [f'<g transform="translate(0 {top:.0f})">', *_plot_lines(of_setting), "</g>"]
        top += max(HEIGHT, TOP + LINE * (len(of_setting) + 1))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top:.0f}" viewBox="0 0 {WIDTH} {top:.0f}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top:.0f}" fill="white"/>', *lines, "</svg>", ""])


def _plot_lines(rows: Sequence[BenchRow]) -> Iterator[str]:
    decibel, sent, prompts = _decibel_range(rows), _byte_range(rows), rows[0].prompts
    yield _text(LEFT, 24, f"Quality against bytes: {rows[0].setting.title}", size=16)
    yield _text(LEFT, 42, f"{prompts} prompt{'s' * (prompts > 1)}, {rows[0].setting.model}", color="#555555")
    for level in range(int(decibel[0]), int(decibel[1]) + 1, 10):
        y = _height(level, decibel)
        yield _line(LEFT, y, WIDTH - RIGHT, y)
        yield _text(LEFT - 8, y + 4, str(level), anchor="end")
    for size in _ticks(sent):
        x = _across(size, sent)
        yield _line(x, TOP, x, HEIGHT - BOTTOM)
        yield _text(x, HEIGHT - BOTTOM + 18, f"{size / 1e6:g}", anchor="middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "sent per step and rank, MB (logarithmic)", anchor="middle")
    yield f'<g transform="rotate(-90 20 {HEIGHT / 2:.0f})">{_text(20, HEIGHT / 2, "PSNR, dB", anchor="middle")}</g>'
    for point in _points(rows):
        yield from _marker(point, point.x, point.y)
        y = TOP + LINE * point.number - LINE / 2
        yield from _marker(point, WIDTH - RIGHT + 24, y)
        figures = f"{decibels(point.row.psnr_db)} dB, {point.row.plan}"
        yield _text(WIDTH - RIGHT + 40, y + 4, figures, color=point.color)


def _marker(point: Point, x: float, y: float) -> Iterator[str]:
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{point.color}" fill-opacity="0.85"/>'
    yield _text(x, y + 3.5, str(point.number), anchor="middle", size=10, color="white")


def _points(rows: Sequence[BenchRow]) -> list[Point]:
    decibel, sent = _decibel_range(rows), _byte_range(rows)
    return [
        Point(
            row,
            number + 1,
            _across(max(row.bytes_per_step, sent[0]), sent),
            _height(min(row.psnr_db, decibel[1]), decibel),
            COLORS[number % len(COLORS)],
        )
        for number, row in enumerate(rows)
    ]


def _decibel_range(rows: Sequence[BenchRow]) -> tuple[float, float]:
    found = [min(row.psnr_db, TOP_DB) for row in rows]
    return 10.0 * math.floor((min(found) - 2) / 10), 10.0 * math.ceil((max(found) + 2) / 10)


def _byte_range(rows: Sequence[BenchRow]) -> tuple[float, float]:
    found = [row.bytes_per_step for row in rows if row.bytes_per_step > 0] or [1e6]
    return min(found) / 2, max(found) * 2


def _across(value: float, span: tuple[float, float]) -> float:
    low, high = span
    return LEFT + math.log(value / low) / math.log(high / low) * (WIDTH - RIGHT - LEFT)


def _height(value: float, span: tuple[float, float]) -> float:
    low, high = span
    return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)


def _ticks(span: tuple[float, float]) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within a range."""
    low, high = span
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for digit in (1, 2, 5) if low <= (value := digit * 10.0**power) <= high]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, color: str = "#222222") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
