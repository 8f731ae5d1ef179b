"""One process beside several ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parsed(description: str | None, names: Sequence[str], *, has_steps: bool = True) -> argparse.Namespace:
    """The command line of these benchmarks: some of `names`, `--write`, and `--steps` where there are any."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=names, help=f"some of {', '.join(names)}")
    if has_steps:
        parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"no {unknown[0]!r} here: there are {', '.join(names)}")
    return options
