"""A stream whose ranks are killed one after another, chosen by chance: lost blocks, and processes that were not killed.

    python -m benchmarks.stream.kills --kills 50 --devices cpu:3 --write docs/figures/stream-kills.md

A line on stderr for each kill. Pids of all ranks are compared before it, and when blocks of the next epoch come out.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import publish
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import Chunk, StreamDelivery
from patchpar.stream.session import StreamSession

SETTLED = 6
"""Blocks before the first kill: in the first ones of a stream all ranks begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """`rank` was killed. `others_changed`: ranks that were started anew beside it. `seconds`: to the next epoch."""

    rank: int
    others_changed: int
    seconds: float


def killed(pipe: StreamingPipeline, stream: StreamSession, rank: int, taken: list[Chunk]) -> Kill:
    """Kill a rank, and append chunks to `taken` until one comes of the next epoch. Raises the error of the stream."""
    before, began = pipe._workers.pids, time.monotonic()
    os.kill(before[rank], signal.SIGKILL)
    epoch = taken[-1].epoch
    while taken[-1].epoch == epoch:
        taken.append(next(stream))
    pairs = zip(before, pipe._workers.pids, strict=True)
    changed = [number for number, (old, new) in enumerate(pairs) if old != new]
    others = len(set(changed) - {rank})
    return Kill(rank=rank, others_changed=others, seconds=time.monotonic() - began)


def measure(options: argparse.Namespace) -> list[str]:
    """A line of the table."""
    chance, kills, taken = random.Random(options.seed), list[Kill](), list[Chunk]()
    delivery = StreamDelivery(lead=1, restarts=options.kills)
    with (
        StreamingPipeline.from_pretrained(options.model, devices=options.devices, deadline=options.deadline) as pipe,
        pipe.stream(seed=options.seed, delivery=delivery) as stream,
    ):
        ranks, plan = pipe.plan.ranks, str(pipe.plan)
        for _ in range(SETTLED):
            taken.append(next(stream))
        while len(kills) < options.kills:
            kills.append(killed(pipe, stream, chance.randrange(ranks), taken))
            taken += [next(stream) for _ in range(options.between)]
            print(f"{len(kills)}: {kills[-1]}, block {taken[-1].block}", file=sys.stderr, flush=True)
        is_same_plan = pipe.plan.ranks == ranks
    lost = len(set(range(taken[-1].block + 1)) - {chunk.block for chunk in taken})
    in_order = [chunk.block for chunk in taken] == sorted({chunk.block for chunk in taken})
    seconds = [kill.seconds for kill in kills]
    others = sum(kill.others_changed for kill in kills)
    return [
        f"| {plan} | {len(kills)} | {len(taken)} | {lost} | {'yes' if in_order else '**no**'} | {others} | "
        f"{'yes' if is_same_plan else '**no**'} | {statistics.median(seconds):.1f}, {max(seconds):.1f} |"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded-face", help="folder of a block-causal model (embedded-face)")
    parser.add_argument("--devices", default="cpu:3", help="ranks (cpu:3)")
    parser.add_argument("--kills", type=int, default=50, help="ranks that are killed, one after another (50)")
    parser.add_argument("--between", type=int, default=2, help="blocks from a restart to the next kill (2)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that a rank may stall (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the stream, and of the choice of ranks (1)")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    lines = [
        "# A stream whose ranks are killed",
        "",
        f"{options.model}: workers are killed with SIGKILL, one after another, chosen by chance (seed {options.seed}). "
        "By benchmarks/stream/kills.py.",
        "",
        "| plan | kills | blocks | lost | in order, none twice | other ranks started anew | same plan at the end | "
        "seconds to the next epoch: median, most |",
        "|---|---|---|---|---|---|---|---|",
        *measure(options),
    ]
    publish(lines, options.write)


if __name__ == "__main__":
    main()
