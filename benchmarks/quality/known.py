"""The rows of a page that was written before: what was measured elsewhere, or long ago, stays until it is outdone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.image_quality import MAX_DB
from benchmarks.page import contents
from benchmarks.quality.records import ONE_PROCESS, Named, Setting
from benchmarks.quality.table import Row, in_order

HEADING = re.compile(r"(\d+) x (\d+) pixels, (\d+) steps, (.+)")
DETAILS = re.compile(r"Guidance ([\d.]+), seeds from (\d+), model `(\w+)`\.")


def rows_of_page(path: Path) -> list[Row]:
    """Every row of the page, its figures rounded as it has them; none where there is no page.

    Raises ValueError for a heading that is no setting, or a method that is none.
    """
    if not path.is_file():
        return []
    sections = contents(path.read_text())[1:]
    return [_row(section, cells) for section in sections for cells in section["tables"][0]]


def with_measured(known: Iterable[Row], measured: Iterable[Row]) -> list[Row]:
    """Both, and of a method in a setting the row with more captions; with as many, the measured one.

    A measured row that does not begin with the first caption goes on where the known one ends. Raises ValueError
    where it leaves captions out.
    """
    found: dict[object, Row] = {(row.setting, row.method, row.ranks): row for row in known}
    for row in measured:
        key = row.setting, row.method, row.ranks
        found[key] = _more_of(found[key], row) if key in found else _from_the_start(row, 0)
    return in_order(found.values())


def _more_of(known: Row, row: Row) -> Row:
    if row.first + row.captions < known.captions or (row.first and row.first + row.captions == known.captions):
        return known
    return _joined(known, _from_the_start(row, known.captions)) if row.first else row


def _from_the_start(row: Row, known: int) -> Row:
    if row.first not in (0, known):
        raise ValueError(
            f"{row.setting}, {row.ranks} ranks, {row.label}: generated from caption {row.first} on, and the table has "
            f"{known} of it: generate the others too (--first {known})"
        )
    return row


def _joined(one: Row, more: Row) -> Row:
    """Means over the captions of both."""

    def mean(of: Callable[[Row], float]) -> float:
        return (one.captions * of(one) + more.captions * of(more)) / (one.captions + more.captions)

    def mean_if_both(of: Callable[[Row], float | None]) -> float | None:
        return None if of(one) is None or of(more) is None else mean(lambda row: of(row) or 0.0)

    return replace(
        more,
        first=one.first,
        captions=one.captions + more.captions,
        psnr_db=mean(lambda row: row.psnr_db),
        worst_db=min(one.worst_db, more.worst_db),
        ssim=mean(lambda row: row.ssim),
        lpips=mean_if_both(lambda row: row.lpips),
        right=mean(lambda row: row.right),
        exact_steps=mean(lambda row: row.exact_steps),
        bytes_per_step=mean(lambda row: row.bytes_per_step),
        stale_step_bytes=mean_if_both(lambda row: row.stale_step_bytes),
        seconds_waited=mean(lambda row: row.seconds_waited),
        crowded=one.crowded or more.crowded,
    )


def _row(section: Mapping[str, object], cells: Mapping[str, str]) -> Row:
    setting = _setting(str(section["heading"]), str(section["text"]))
    label, one = cells["method"].split(" (")[0], cells["method"] == ONE_PROCESS.strategy
    return Row(
        setting=setting,
        method=ONE_PROCESS if one else Named.parse(label).method,
        label=label,
        ranks=int(cells["ranks"]),
        captions=int(cells["captions"]),
        psnr_db=MAX_DB if one else float(cells["PSNR, dB"]),
        worst_db=MAX_DB if one else float(cells["worst"]),
        ssim=1.0 if one else float(cells["SSIM"]),
        lpips=None if one or cells["LPIPS"] == "not measured" else float(cells["LPIPS"]),
        right=float(cells["captions right"].removesuffix(" %")) / 100,
        exact_steps=float(cells["exact steps"]),
        bytes_per_step=1e6 * float(cells["sent, MB"] or 0),
        stale_step_bytes=1e6 * float(cells["stale"]) if cells["stale"] else None,
        seconds_waited=float(cells["waited, ms"].removesuffix("*") or 0) / 1e3,
        crowded=cells["waited, ms"].endswith("*"),
    )


def _setting(heading: str, text: str) -> Setting:
    title, details = HEADING.fullmatch(heading), DETAILS.search(text)
    if title is None or details is None:
        raise ValueError(f"{heading!r} is no setting, such as 256 x 256 pixels, 20 steps, DDIM")
    height, width, steps = map(int, title.groups()[:3])
    return Setting(
        model=details[3],
        height=height,
        width=width,
        steps=steps,
        scheduler=title[4],
        guidance=float(details[1]),
        seed=int(details[2]),
    )
