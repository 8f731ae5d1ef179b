"""Draw the diagrams of the README and the docs anew; seconds.

python -m benchmarks.diagrams
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.diagrams.bands import halos, icon, overview, vae
from benchmarks.diagrams.large import structure
from benchmarks.diagrams.ranks import guidance, mesh, stages
from benchmarks.diagrams.steps import context, staleness
from benchmarks.diagrams.tokens import rings
from benchmarks.diagrams.weights import piped, slots

FOLDER = Path(__file__).parents[2] / "assets" / "figures"
DIAGRAMS: dict[str, Callable[[], str]] = {
    "overview": overview,
    "mesh": mesh,
    "halos": halos,
    "staleness": staleness,
    "context": context,
    "rings": rings,
    "guidance": guidance,
    "structure": structure,
    "vae": vae,
    "stages": stages,
    "slots": slots,
    "piped": piped,
    "icon": icon,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write every diagram."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    for name, generate in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(generate())


if __name__ == "__main__":
    main()
