"""Split every transformer, UNet and pipeline class of the installed diffusers, and write docs/coverage.md.

python -m benchmarks.coverage                          all of it; a quarter of an hour on two cores
python -m benchmarks.coverage --only Flux --ranks 2    a part of it, printed instead of written
python -m benchmarks.coverage --part pipelines         pipelines alone; the page keeps what it has of classes
python -m benchmarks.coverage --kept build/coverage    keep the report of each pipeline, and read those that are there
                                                       of the same versions and sources
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.battery.environment import sources_of

from .classes import class_reports
from .page import PAGE, versions, with_pipelines, written
from .pipelines import report as pipelines
from .pipelines.examine import pipeline_reports
from .pipelines.kept import KeptReports
from .pipelines.zoo import ZOO
from .report import RANKS, Report
from .subjects import Subject, left_out, subjects

PARTS = ("classes", "pipelines")


def main() -> int:
    """1 where anything is wrong or failed, 2 where there is nothing to try."""
    asked = _arguments()
    known = subjects() if "classes" in asked.part else []
    chosen = [each for each in known if _is_asked_for(each.name, asked.only)]
    names = [name for name in ZOO if _is_asked_for(name, asked.only)] if "pipelines" in asked.part else []
    if not chosen and not names:
        sys.stderr.write(f"no class has {' or '.join(asked.only)} in its name\n")
        return 2
    with class_reports(chosen, asked.ranks) as reports_of_classes:  # at the same time: either leaves cores idle
        zoo = pipeline_reports(names, KeptReports(asked.kept and asked.kept / _state()))
        classes = reports_of_classes()
    if not asked.only and tuple(asked.ranks) == RANKS:
        PAGE.write_text(_page(classes, known, zoo, PAGE.read_text()))
        sys.stderr.write(f"written to {PAGE}\n")
    else:
        sys.stdout.write(_page(classes, known, zoo, ""))
    return _reported([*classes, *zoo])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="classes with this in their name")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="what is tried (default: both)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS), help="of classes (default: all of them)"
    )
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="reports of pipelines, from and for other runs")
    return parser.parse_args()


def _state() -> str:
    """What reports are of: versions, and the sources as they are in the folder."""
    known = versions()
    return f"torch-{known['torch']}-diffusers-{known['diffusers']}-{sources_of(PAGE.parents[1])}"


def _is_asked_for(name: str, only: Sequence[str]) -> bool:
    return not only or any(part in name for part in only)


def _page(classes: Sequence[Report], known: Sequence[Subject], zoo: Sequence[pipelines.Report], page: str) -> str:
    """The page with what was tried anew. `known`: all classes that have a small configuration."""
    if classes:
        page = with_pipelines(written(classes, left_out({each.name for each in known})), page)
    return pipelines.replaced(page, pipelines.section(zoo, pipelines.left_out())) if zoo else page


def _reported(reports: Sequence[Report | pipelines.Report]) -> int:
    """Say what is not as it should be; the exit status."""
    failed = [f"{each.name}: {failure}\n" for each in reports for failure in each.failures]
    sys.stderr.write("".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
