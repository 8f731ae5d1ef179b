"""The page that says what was found: written, and read back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch

from .modes import modes
from .report import RANKS, Report, Row, row_of
from .tables import cells_under, power, table
from .trial import LIMIT, SEEN

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
HEADER = ("class", "family", "split", "modes", "2 ranks", "3 ranks", "4 ranks", "without exchange", "note")
LEFT_OUT = ("class", "why nothing is tried")
PIPELINES = "## Pipelines"
"""Title of the part about pipelines, behind all else."""
STATUSES = {
    "tokens": "split between their tokens, exact",
    "bands": "in bands, exact",
    "tokens, partly": "split between their tokens, exact, some blocks whole on every rank",
    "refused": "refused, with the reason",
    "failed": "failed",
}
"""From good to bad. A class in several configurations counts as its worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the page holds: versions it was written with, a row for each denoiser, and the classes without."""

    torch: str
    diffusers: str
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]


def changes(page: Page, here: Collection[str]) -> str:
    """Which classes of denoisers are new `here`, in a diffusers that the page is not of, and which are gone."""
    known = {row.name for row in page.rows} | set(page.left_out)
    new, gone = sorted(set(here) - known), sorted(known - set(here))
    return f"new: {', '.join(new) or 'none'}; gone: {', '.join(gone) or 'none'}"


def versions() -> dict[str, str]:
    """Of what is installed here, builds for other hardware being the same version."""
    return {"torch": torch.__version__.partition("+")[0], "diffusers": diffusers.__version__}


def written(reports: Sequence[Report], left_out: Mapping[str, str]) -> str:
    """The page."""
    rows = [row_of(each) for each in reports]
    return "\n".join(
        (
            "# Coverage",
            "",
            _opening(reports),
            "",
            *table(("", "classes"), _summary(reports, left_out)),
            "",
            _own_lines(reports),
            "",
            "## What is tried",
            "",
            _tried(),
            "",
            "## Class by class",
            "",
            *table(HEADER, [row.cells() for row in rows]),
            "",
            "## Left out",
            "",
            *table(LEFT_OUT, list(left_out.items())),
            "",
        )
    )


def with_pipelines(page: str, other: str) -> str:
    """A page with the part about pipelines that the other one has."""
    _, title, part = other.partition(f"\n{PIPELINES}\n")
    return f"{page.rstrip()}\n{title}{part}" if title else page


def _opening(reports: Sequence[Report]) -> str:
    known = versions()
    names = {each.name for each in reports}
    return (
        f"Every transformer and UNet class of diffusers that a small configuration can be made of, {len(names)} of "
        f"them in {len(reports)} configurations, split between ranks and held against its plain forward. Written by "
        f"`python -m benchmarks.coverage` (`make coverage`) with torch {known['torch']} and diffusers "
        f"{known['diffusers']}: random weights, fp32, CPU, each rank a thread that talks to the others as a process "
        "would."
    )


def _summary(reports: Sequence[Report], left_out: Mapping[str, str]) -> list[tuple[str, str]]:
    order = list(STATUSES)
    worst: dict[str, int] = {}
    for each in reports:
        worst[each.name] = max(worst.get(each.name, 0), order.index(each.split))
    counted = Counter(worst.values())
    rows = [(text, str(counted[number])) for number, text in enumerate(STATUSES.values())]
    return [*rows, ("left out", str(len(left_out)))]


def _own_lines(reports: Sequence[Report]) -> str:
    known = {each.name: each.own_lines for each in reports if each.own_lines}
    if not known:
        return "No class is known to the package by name: none of them has a line of its own."
    lines = "; ".join(f"{name} in {', '.join(positions)}" for name, positions in known.items())
    return f"Known to the package by name: {lines}."


def _tried() -> str:
    exact = [*dict.fromkeys(name for count in RANKS[:2] for name in _exact_names(count))]
    return "\n".join(
        (
            "The first use is a user's: what mixes tokens is looked for by running the model, and the split model is "
            "verified. What is found then serves for all that follows, at two sizes that split unevenly.",
            "",
            f"- Exact on 2 and 3 ranks: {_listed(exact)}. On 4 ranks the hybrids (USP): {_listed(_exact_names(4))}.",
            "- Stale on 2 and 3 ranks: `displaced`, `fresh-edges`, `pcpp`. Warmed up to the end, they must be exact. "
            "After one exact evaluation the same inputs must give the same again, since the old keys are then the new "
            "ones; other inputs must not give what is exact for them, since the keys are old. `pcpp` drops most keys, "
            "so that it must differ in both cases; on 2 ranks with `fraction=1.0` it drops none.",
            "- Without exchange, in every strategy: nothing may be right.",
            "- In the end every model must be as it was before, bit by bit, and carry no hook.",
            "",
            "*Modes* counts what was right of what was tried; what is refused instead is in the note. *Ranks* is the "
            "power of ten that the largest relative error of everything exact stays below (limit "
            f"{power(LIMIT)}), *without exchange* the smallest error of the controls (at least {power(SEEN)}).",
        )
    )


def _exact_names(ranks: int) -> list[str]:
    return [mode.name for mode in modes(ranks) if mode.strategy.startswith("exact") and mode.exchange == "on"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def read(text: str) -> Page:
    """The page that was written. Raises ValueError for anything else."""
    known = re.search(r"with torch (\S+) and diffusers (\S+):", " ".join(text.split()))
    if known is None:
        raise ValueError("it does not say which versions it was written with")
    rows = [Row(*cells) for cells in cells_under(text, HEADER)]
    left_out = {name: reason for name, reason in cells_under(text, LEFT_OUT)}
    return Page(torch=known[1], diffusers=known[2], rows=tuple(rows), left_out=left_out)
