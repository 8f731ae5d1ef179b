"""The VAE in bands of rows against the plain one: accuracy, peak, bytes, time.

    python -m benchmarks.vae --write docs/figures/vae.md
    python -m benchmarks.vae AutoencoderKL AutoencoderKLWan
    python -m benchmarks.vae --only time --pixels 512 --turns 5

Every class of VAE, tiny, random weights, latents whose power falls as k^-3, fp32, CPU workers. PSNR is the least of any
rank; "alone" is the negative control, every band by itself. Peak: what the rank that needs most allocates, times the
number of ranks, over what the plain method allocates; of VAEs with all their layers, a quarter or third as wide. Time:
SDXL's VAE, a quarter as wide, one process with one thread and then two with one thread each, in turns, medians. The
processor's time does not count waiting. Exit code 1 if a cell is below 100 dB or a control is not wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import publish_section

OPENING = "# The VAE in bands of rows\n"
MIN_DB, CONTROL_DB = 100.0, 60.0
WORLDS = (2, 3, 4)
PEAK_SIZE = (32, 8)
SIZE = (17, 12)  # latent rows and columns: no number of ranks shares 17 rows evenly
WIDTHS = (32, 64, 128, 128)
ACCURACY = [
    "| VAE | method | 2 ranks | 3 ranks | 4 ranks | alone | tiled | sent by a rank of 4 | rounds |",
    "|" + "---|" * 9,
]
PEAK = ["| VAE | method | plain | 2 ranks | 4 ranks |", "|" + "---|" * 5]
TIME = [
    "| method | pixels | one process | two | faster | processor, one | processor, two | without waiting | waited |",
    "|" + "---|" * 9,
]


def accuracy_rows(pool: Any, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """One line for each class and method, and whether it keeps the promise."""
    from benchmarks.vae.ranks import tiled_db

    for name in names:
        for method in ("decode", "encode"):
            tiled = tiled_db(name, SIZE) if method == "decode" else None
            found = [
                pool.call("run", "benchmarks.vae.ranks:accuracy", world, "auto", (name, method, SIZE))[:world]
                for world in WORLDS
            ]
            yield _accuracy_row(f"{name} | {method}", found, tiled)


def _accuracy_row(lead: str, found: Sequence[Sequence[Any]], tiled: float | None) -> tuple[str, bool]:
    exact = [min(each.psnr_db for each in ranks) for ranks in found]
    alone = max(each.alone_db for ranks in found for each in ranks)
    sent = max(each.bytes_sent for each in found[-1])
    cells = " | ".join(f"{value:.0f} dB" for value in (*exact, alone))
    tiles = "" if tiled is None else f"{tiled:.0f} dB"
    good = min(exact) >= MIN_DB and alone < CONTROL_DB
    line = f"| {lead} | {cells} | {tiles} | {sent / 1024:.0f} KiB | {found[-1][0].rounds} |"
    return line, good


def peak_rows(pool: Any) -> Iterator[str]:
    """One line for each VAE and method."""
    from benchmarks.vae.ranks import PEAKS

    for name in PEAKS:
        for method in ("decode", "encode"):
            cells, plain = [], 0
            for world in (2, 4):
                found = pool.call("run", "benchmarks.vae.ranks:peak", world, "auto", (name, method, PEAK_SIZE))[:world]
                plain = found[0][0]
                cells.append(f"{max(own for _, own in found) * world / plain:.2f}")
            yield f"| {name} | {method} | {plain / 2**20:.0f} MiB | {' | '.join(cells)} |"


def time_rows(pool: Any, pixels: int, turns: int) -> Iterator[str]:
    """One line for each method."""
    for method in ("decode", "encode"):
        arguments = (WIDTHS, method, pixels, turns)
        ranks = pool.call("run", "benchmarks.vae.ranks:times", 2, "auto", arguments)[:2]
        plain, processor = (statistics.median(each) for each in (ranks[0].plain, ranks[0].plain_processor))
        split = statistics.median(map(max, zip(*(rank.split for rank in ranks), strict=True)))
        own = statistics.median(map(max, zip(*(rank.split_processor for rank in ranks), strict=True)))
        waited = statistics.median(map(max, zip(*(rank.waited for rank in ranks), strict=True)))
        clock = f"{plain:.2f} s | {split:.2f} s | {plain / split:.2f}"
        computing = f"{processor:.2f} s | {own:.2f} s | {processor / own:.2f}"
        yield f"| {method} | {pixels} x {pixels} | {clock} | {computing} | {waited:.2f} s |"


def main() -> int:
    """Print the tables."""
    from patchpar.launch.local import LocalExecutor
    from tests.vae.autoencoders import KINDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--only", choices=("accuracy", "peak", "time"), help="one of the tables")
    parser.add_argument("--pixels", type=int, default=512, help="side of the image that is timed")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", type=Path, help="also write the tables to this file, which keeps its others")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in KINDS]
    if unknown:
        parser.error(f"no VAE {unknown[0]!r}: there are {', '.join(KINDS)}")
    missed: list[str] = []
    with LocalExecutor(["cpu"] * max(WORLDS), "tests.ranks:Ranks", deadline=600.0, preload=["tests.tiny"]) as pool:
        for name, head, rows in _tables(pool, options):
            if options.only in (None, name):
                publish_section(OPENING, name.capitalize(), _checked(head, rows, missed), options.write)
    return 1 if missed else 0


def _checked(head: list[str], rows: Iterator[tuple[str, bool]], missed: list[str]) -> Iterator[str]:
    """Yield the lines of a table; those that miss what is guaranteed are added to `missed`."""
    yield from head
    for line, good in rows:
        missed += [] if good else [line]
        yield line


def _tables(pool: Any, options: Any) -> Iterator[tuple[str, list[str], Iterator[tuple[str, bool]]]]:
    """(name, what stands above it, its rows and whether each keeps what is guaranteed) of every table."""
    size = f"{SIZE[0]} x {SIZE[1]}"
    yield (
        "accuracy",
        [f"Latents of {size}, fp32, against the plain method. The guarantee is {MIN_DB:.0f} dB.", "", *ACCURACY],
        accuracy_rows(pool, options.names),
    )
    yield (
        "peak",
        ["Peak of one rank times the number of ranks, in units of the plain peak; fp32.", "", *PEAK],
        ((line, True) for line in peak_rows(pool)),
    )
    yield (
        "time",
        [
            f"SDXL's VAE, a quarter as wide, fp32, one thread per process, medians of {options.turns} turns "
            f"(`python -m benchmarks.vae --only time --pixels {options.pixels} --turns {options.turns}`).",
            "",
            *TIME,
        ],
        ((line, True) for line in time_rows(pool, options.pixels, options.turns)),
    )


if __name__ == "__main__":
    sys.exit(main())
