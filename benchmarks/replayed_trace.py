"""Replay a trace of two real ranks: their own computing and exchanges, with waits that follow from them alone.

    python -m benchmarks.replayed_trace                        makes a trace with torchrun, over gloo
    python -m benchmarks.replayed_trace --trace trace.json     one made by patchpar generate --plan patch=2 --trace

The seconds between exchange points, and those that a send takes, are taken from the trace. How long a rank waits is
not, except for the least that the same wait took in any step, which is the copy of the values. If the replay is as long
as the trace, its clocks and waits are those of real ranks. Plans are exact: a wait is for the last send of its kind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from patchpar.plan.replay.replay import replay
from patchpar.plan.replay.tape import Kernel, Send, TapeEntry, Wait
from patchpar.plan.replay.topology import equal_ports

SKIPPED = 2
"""Steps at the beginning, in which layers are found and memory is allocated."""
MICRO = 1e-6
NO_LIMIT = 1e18
MOST = 10**6  # exchanges at one point


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """A send or a wait of one rank, in seconds."""

    what: str
    point: tuple[str, str]
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """The events of one rank from `start` to `end`."""

    events: Sequence[TracedEvent]
    start: float
    end: float

    @classmethod
    def of(cls, entries: Sequence[dict[str, Any]]) -> Stretch:
        """Read the steps of one rank after the first."""
        ends = sorted(MICRO * (each["ts"] + each["dur"]) for each in entries if each.get("cat") == "step")
        start, end = ends[SKIPPED - 1], ends[-1]
        events = [
            TracedEvent(
                each["cat"],
                (each["name"].partition(" ")[2], each["args"]["where"]),
                MICRO * each["ts"],
                MICRO * (each["ts"] + each["dur"]),
            )
            for each in entries
            if each.get("cat") in ("send", "wait")
        ]
        inside = [each for each in events if start <= each.start and each.end <= end]
        return cls(sorted(inside, key=lambda each: each.start), start, end)

    def tape(self, rank: int, zero: float) -> tuple[TapeEntry, ...]:
        """Return its tape, from the time `zero` on."""
        least: dict[tuple[str, str], float] = {}
        for each in self.events:
            if each.what == "wait":
                least[each.point] = min(least.get(each.point, NO_LIMIT), each.end - each.start)
        found: list[TapeEntry] = []
        sent: Counter[tuple[str, str]] = Counter()
        now = zero
        for each in self.events:
            found.append(Kernel("compute", max(0.0, each.start - now)))
            now = each.end
            number = crc32(repr(each.point).encode()) * MOST
            if each.what == "send":
                found.append(Kernel("send", each.end - each.start))
                found.append(Send(number + sent[each.point], (1 - rank,), *each.point[:1], 0, each.point[1]))
                sent[each.point] += 1
            else:
                found.append(Wait(number + sent[each.point] - 1, 1 - rank, 0, each.point[1]))
                found.append(Kernel("copy", least[each.point]))
        found.append(Kernel("compute", max(0.0, self.end - now)))
        return tuple(found)


def compared(trace: Path) -> tuple[float, float, float]:
    """Return the seconds of the trace, those of its replay, and those that the ranks waited."""
    entries = [each for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"]
    ranks = [Stretch.of([each for each in entries if each["pid"] == rank]) for rank in range(2)]
    zero = min(each.start for each in ranks)
    found = replay([each.tape(rank, zero) for rank, each in enumerate(ranks)], equal_ports(NO_LIMIT))
    waited = sum(each.end - each.start for rank in ranks for each in rank.events if each.what == "wait")
    return max(each.end for each in ranks) - zero, found.seconds, waited


def traced(folder: Path, steps: int) -> Path:
    """Return the trace of an image of two ranks over gloo."""
    file = folder / "trace.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "patchpar", "generate"]
    command += ["a red house", "--devices", "cpu", "--plan", "patch=2", "--steps", str(steps), "--trace", str(file)]
    subprocess.run([*command, "--output", str(folder / "image.png")], check=True)
    return file


def main() -> None:
    """Print the length of a trace and of its replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="of two ranks; without it one is made")
    parser.add_argument("--steps", type=int, default=12, help="of the trace that is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        real, replayed, waited = compared(options.trace or traced(Path(folder), options.steps))
    print(f"{real:.3f} s, replayed {replayed:.3f} s: {replayed / real - 1:+.1%}; both ranks waited {waited:.3f} s")


if __name__ == "__main__":
    main()
