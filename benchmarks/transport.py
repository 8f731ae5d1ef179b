"""What the bare transports can do: two ranks of this machine exchange messages of one size, through either in turn.

    python -m benchmarks.transport --write docs/figures/transport.md

Both ranks send and then wait, as an exchange point does. A measurement is the time from before sending until the
other's message is here; the two transports take turns, so that whatever else the machine does meets both. The median
says what an exchange usually costs; the mean also shows the rare long waits, and it is the mean that a denoiser with
120 of them pays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.page import write_page

if TYPE_CHECKING:
    from tests.ranks import PoolRank

SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
TRANSPORTS = ("shared_memory", "torch")
DEADLINE = 60.0
Found = dict[str, dict[int, tuple[float, float]]]


def measured(this: PoolRank, sizes: Sequence[int], rounds: int) -> Found:
    """On a rank: median and mean seconds of one exchange by transport and message size in bytes."""
    import torch

    from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, Transport, connect

    rank = this.rank
    lines = {name: connect(this.context, through=name) for name in TRANSPORTS}
    if rank > 1:
        return {}

    def send_recv(line: Transport, x: torch.Tensor) -> float:
        start = time.perf_counter()
        line.send_recv([Outgoing((1 - rank,), (x,))], [Incoming(1 - rank, (TensorSpec.of(x),))], "benchmark").wait()
        return time.perf_counter() - start

    seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in TRANSPORTS}
    for size in sizes:
        x = torch.zeros(size, dtype=torch.uint8)
        repeats = max(3, min(20, (4 << 20) // size))
        for number in range(rounds + 1):
            for name, line in lines.items():
                taken = [send_recv(line, x) for _ in range(repeats)]
                seconds[name][size] += taken if number else []  # the first round warms up
    for line in lines.values():
        line.close()
    return {name: {size: _summary(taken) for size, taken in by.items()} for name, by in seconds.items()}


def _summary(taken: Sequence[float]) -> tuple[float, float]:
    return statistics.median(taken), statistics.mean(taken)


def table(found: Found) -> list[str]:
    """Microseconds per exchange, and bytes each way over that time."""
    lines = [
        "| bytes each way | shared memory, median (mean) | gloo, median (mean) | shared memory | gloo |",
        "|---|---|---|---|---|",
    ]
    for size in found["shared_memory"]:
        both = [found[name][size] for name in TRANSPORTS]
        times = " | ".join(f"{median * 1e6:,.0f} ({mean * 1e6:,.0f}) µs" for median, mean in both)
        rates = " | ".join(f"{size / median / 1e6:,.0f} MB/s" for median, _ in both)
        lines.append(f"| {size:,} | {times} | {rates} |")
    return lines


def main() -> None:
    """Print the table."""
    from patchpar.launch.local import LocalExecutor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each transport per size")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    with (
        TemporaryDirectory() as folder,
        LocalExecutor(["cpu", "cpu"], "tests.ranks:Ranks", deadline=DEADLINE) as pool,
    ):
        pool.call("form_group", str(Path(folder) / "store"))
        first, second = pool.call("run", "benchmarks.transport:measured", 2, "auto", (SIZES, options.rounds))
    slower: Found = {name: {size: max(by[size], second[name][size]) for size in by} for name, by in first.items()}
    lead = "Two ranks on one machine, one thread each; the slower rank's figures. Rates are those of the medians."
    text = "\n".join(["# The bare transports", "", lead, "", *table(slower), ""])
    print(text)
    if options.write:
        write_page(text, options.write)


if __name__ == "__main__":
    main()
