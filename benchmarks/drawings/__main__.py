"""Draw the drawings of the README and the docs anew; seconds.

python -m benchmarks.drawings
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.drawings.bands import halos, icon, overview, vae
from benchmarks.drawings.large import structure
from benchmarks.drawings.ranks import guidance, mesh, stages
from benchmarks.drawings.steps import context, staleness
from benchmarks.drawings.tokens import rings

FOLDER = Path(__file__).parents[2] / "assets" / "figures"
DRAWINGS: dict[str, Callable[[], str]] = {
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
    "icon": icon,
}


def main() -> None:
    """Write every drawing."""
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
