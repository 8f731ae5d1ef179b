"""One process beside several ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parsed(description: str | None, names: Sequence[str]) -> argparse.Namespace:
    """The command line of these benchmarks: some of `names`, `--steps` and `--write`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=names, help=f"some of {', '.join(names)}")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    return parser.parse_args()
