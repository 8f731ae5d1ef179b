"""What was found of the pipelines, as the section "Pipelines" of docs/coverage.md: written, and read back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from ..page import PIPELINES
from ..tables import cells_under, power, table
from .entry import Guidance, pipeline_classes
from .trial import LIMIT, SEEN, Outcome
from .zoo import LEFT_OUT, ZOO

LEFT_OUT_HEADER = ("pipeline", "why nothing is tried")
PLANS = ("patch=2", "patch=3", "cfg", "data=2")
"""Columns: `cfg` is cfg=3 where there are three branches, else cfg=2."""
HEADER = ("pipeline", "guidance", *PLANS, "without exchange", "note")
NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One pipeline under every plan that it has prompts and ranks for."""

    name: str
    guidance: Guidance
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> list[str]:
        """What is wrong, or ended in an error that is no refusal, or is no call that diffusers can do."""
        bad = [each for each in self.outcomes if each.status not in ("exact", "refused")]
        return [f"{each.plan}: {each.message}" for each in bad]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. Errors are powers of ten that they stay below, since rounding differs by machine."""

    name: str
    guidance: str
    patch_2: str
    patch_3: str
    cfg: str
    data: str
    without: str
    note: str


def row_of(report: Report) -> Row:
    """The line of the table."""
    found = {_column(each.plan): each for each in report.outcomes}
    controls = [each.control for each in report.outcomes if each.control is not None]
    cells = [_cell(found.get(plan)) for plan in PLANS]
    without = f"{min(controls):.1g}" if controls else NOTHING
    return Row(report.name, report.guidance, *cells, without, _note(report))


def _column(plan: str) -> str:
    return "cfg" if plan.startswith("cfg") else plan


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return NOTHING
    if outcome.status != "exact" or outcome.error is None:
        return outcome.status
    return "equal" if outcome.error == 0 else f"1e{math.floor(math.log10(outcome.error)) + 1}"


def _note(report: Report) -> str:
    """Each sentence once, with the plans it is for; of guidance that a pipeline has not, nothing need be said."""
    plans: dict[str, list[str]] = {}
    for each in report.outcomes:
        if each.message and not (report.guidance == "none" and each.plan.startswith("cfg")):
            plans.setdefault(each.message.splitlines()[0], []).append(each.plan)
    reported = [f"{', '.join(names)}: {message}" for message, names in plans.items()]
    return "; ".join(reported).replace("|", "\\|")


def left_out() -> dict[str, str]:
    """Pipeline classes of the installed diffusers that are not tried, and why."""
    return {name: LEFT_OUT.get(name, "no small pipeline yet") for name in pipeline_classes() if name not in ZOO}


def section(reports: Sequence[Report], missing: Mapping[str, str]) -> str:
    """The section, from its title to the end of the page."""
    rows = [[str(cell) for cell in astuple(row_of(each))] for each in reports]
    return "\n".join(
        (
            PIPELINES,
            "",
            f"{len(reports)} of {len(reports) + len(missing)} pipeline classes of diffusers, in small and with random "
            "weights, under plans for two and three worker processes against plain diffusers in one process: the "
            "relative error of what the call returns, latents where the pipeline can return them (limit "
            f"{power(LIMIT)}). *Guidance* says whether its branches are one call of the denoiser or a call each; "
            "*cfg* is a rank for each branch: `cfg=3` where there are three of them, else `cfg=2`. "
            "*Without exchange* is the smallest error of the same call with the exchange switched off (at least "
            f"{power(SEEN)}). Written by `python -m benchmarks.coverage`.",
            "",
            f"Exact under `patch=2`: {fraction_of(_exact(reports, 'patch=2'), len(reports))}. Exact under `cfg`, of "
            f"those that guide: {fraction_of(_exact(_guided(reports), 'cfg'), len(_guided(reports)))}.",
            "",
            *table(("", *PLANS), _summary(reports)),
            "",
            *table(HEADER, rows),
            "",
            "### Pipelines left out",
            "",
            *table(LEFT_OUT_HEADER, [[name, reason] for name, reason in missing.items()]),
            "",
        )
    )


def fraction_of(part: int, whole: int) -> str:
    """As "9 of 10 (90 %)"."""
    return f"{part} of {whole} ({math.floor(100 * part / max(1, whole))} %)"


def _exact(reports: Sequence[Report], plan: str) -> int:
    return sum(each.status == "exact" for report in reports for each in report.outcomes if _column(each.plan) == plan)


def _guided(reports: Sequence[Report]) -> list[Report]:
    return [each for each in reports if each.guidance != "none"]


def _summary(reports: Sequence[Report]) -> list[list[str]]:
    counted = Counter((_column(each.plan), each.status) for report in reports for each in report.outcomes)
    return [
        [status, *(str(counted[plan, status]) for plan in PLANS)] for status in ("exact", "refused", "wrong", "failed")
    ]


def replaced(page: str, new: str) -> str:
    """The page with this section in the place of the one it has, or behind all else."""
    before, title, _ = page.partition(PIPELINES + "\n")
    return (before if title else page.rstrip("\n") + "\n\n") + new


def rows_of(page: str) -> list[Row]:
    """The lines of the table on a page. Raises ValueError for a page without it."""
    return [Row(*cells) for cells in cells_under(page, HEADER)]
