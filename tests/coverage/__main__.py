"""Split every transformer and UNet class of the installed diffusers, and write down what works: docs/coverage.md.

python -m tests.coverage                         all of it; minutes on one core
python -m tests.coverage --only Flux --ranks 2   a part of it, told instead of written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import diffusers
import torch

from .page import PAGE, with_pipelines, written
from .report import RANKS, Report, examine
from .subjects import Subject, left_out, subjects


def main() -> int:
    """1 where anything failed, 2 where there is nothing to try."""
    wanted = _arguments()
    torch.set_num_threads(1)  # the nets are so small that a second thread costs more than it brings
    diffusers.logging.set_verbosity_error()
    everything = subjects()
    chosen = [each for each in everything if not wanted.only or any(part in each.name for part in wanted.only)]
    if not chosen:
        sys.stderr.write(f"no class has {' or '.join(wanted.only)} in its name\n")
        return 2
    reports = [_examined(subject, wanted.ranks, number, len(chosen)) for number, subject in enumerate(chosen, 1)]
    missing = left_out({each.name for each in everything})
    if chosen == everything and tuple(wanted.ranks) == RANKS:
        PAGE.write_text(with_pipelines(written(reports, missing), PAGE.read_text()))
        sys.stderr.write(f"written to {PAGE}\n")
    else:
        sys.stdout.write(written(reports, missing))
    failed = [f"{each.name} ({each.family}): {failure}\n" for each in reports for failure in each.failures]
    sys.stderr.write("".join(failed))
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.coverage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="classes with this in their name")
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS), help="how many (default: all of them)"
    )
    return parser.parse_args()


def _examined(subject: Subject, ranks: Sequence[int], number: int, total: int) -> Report:
    line = f"{number}/{total} {subject.name} ({subject.family})"

    def note(what: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{line}: {what}")
            sys.stderr.flush()

    report = examine(subject, ranks, note)
    note("")
    sys.stderr.write(f"{line}: {report.split}\n")
    return report


if __name__ == "__main__":
    sys.exit(main())
