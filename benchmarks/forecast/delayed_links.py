"""Replayed steps beside real ones on links of many latencies and rates: two ranks, 8 strategies, 12 links.

    python -m benchmarks.forecast.delayed_links --write docs/figures/delayed-links.md
    python -m benchmarks.forecast.delayed_links --strategy displaced --load 0.6 --latency 5

Ranks run steps of a small UNet whose layers sleep, which takes no processor time, behind a transport that brings
messages no earlier than a link would. What each rank computes between its exchanges is recorded once, on the bare link.
Replayed with the latency and the rate of each link, it should take as long as the real step there. On the bare link,
before and after, a step without its waits tells how long ranks compute now, and its waits the latency of that link.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import contents, write_page
from patchpar.launch.local import LocalExecutor
from patchpar.pipeline.planner.tune.timer import PREEMPTED
from patchpar.plan.link_model import LinkModel, TimedMessage
from patchpar.plan.replay.replay import replay
from patchpar.plan.replay.tape import Boundary, Kernel, Send, Tape, TapeEntry, Wait
from patchpar.plan.replay.topology import Resource, Route, Topology

STRATEGIES = (
    "exact",
    "exact:attention=ring",
    "displaced",
    "displaced:preset=paper",
    "pcpp",
    "fresh-edges",
    "fresh-edges:context=pooled",
    "fresh-edges:context=partials",
)
LATENCIES_MS, LATENCIES_OF_LOADS = (0.2, 1.0, 5.0, 20.0), (0.2, 5.0)
LOADS = (0.3, 0.6, 1.0, 1.5)
"""Of a strategy's step on the bare link: what its bytes take on the link."""
OFF = 0.05
TRIES = 3
"""Of steps on a link, as long as a rank waits too long for a core."""
LONGEST_BARE, HALVINGS = 0.01, 16
"""Seconds; and the halvings by which the latency of the bare link is found."""
STEPS, SETTLED = 10, 4
"""Steps that are replayed, and those at the beginning that are left out: old values are known, and queues as long."""


class Recorded(NamedTuple):
    """One step of one rank on the bare link: its seconds without waits, and its exchanges in order."""

    seconds: float
    messages: tuple[TimedMessage, ...]


class Event(NamedTuple):
    """A wait or a send of exchange `number`, in seconds of computing since the beginning."""

    at: float
    is_wait: bool
    number: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy on one link. Seconds of a step."""

    strategy: str
    link: LinkModel
    bare: float
    real: float
    replayed: float

    @property
    def off(self) -> float:
        """The relative error of the replay."""
        return self.replayed / self.real - 1


def tape_of(own: Recorded, other: Recorded, rank: int, computing: float, overtake: int) -> Tape:
    """Return the program of one of two ranks, which computes for so many seconds in a step."""
    bare, scale, count = computing, computing / own.seconds, len(own.messages)
    events = []
    for step in range(STEPS):
        for number, message in enumerate(own.messages):
            at = step * bare + scale * message.sent
            events.append(Event(at, False, step * count + number, int(message.num_bytes)))
            if step >= message.age and other.messages[number].num_bytes:
                needed = step * bare + scale * message.needed
                events.append(Event(needed, True, (step - message.age) * count + number, 0))
    found, now, step = list[TapeEntry](), 0.0, 0
    for event in sorted(events):
        while event.at >= step * bare:
            found += [Kernel("compute", max(0.0, step * bare - now)), Boundary(f"step {step}", is_step=True)]
            now, step = max(now, step * bare), step + 1
        found.append(Kernel("compute", max(0.0, event.at - now)))
        now = max(now, event.at)
        if event.is_wait:
            found.append(Wait(event.number, 1 - rank, 0))
        elif event.num_bytes:
            found.append(Send(event.number, (1 - rank,), "", event.num_bytes, bulk=0 < overtake < event.num_bytes))
    return (*found, Kernel("compute", max(0.0, STEPS * bare - now)))


def replayed_step(ranks: Sequence[Recorded], link: LinkModel, computing: Sequence[float]) -> float:
    """Return the seconds of a later step of two ranks, each with one way out, that compute for so many seconds."""
    tapes = [tape_of(ranks[rank], ranks[1 - rank], rank, computing[rank], link.overtake) for rank in range(2)]
    topology = Topology(lambda a, b: Route((Resource(f"out {a}", link.rate),), link.latency))
    found = replay(tapes, topology)
    starts = [each.start for each in found.intervals if each.rank == 0 and each.name.startswith("step ")]
    return (found.ends[0] - starts[SETTLED]) / (STEPS - SETTLED)


def bare_latency(ranks: Sequence[Recorded], computing: Sequence[float], bare: float) -> float:
    """Return the latency with which a step on the bare link takes `bare` seconds, at most LONGEST_BARE."""
    low, high = 0.0, LONGEST_BARE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_less = replayed_step(ranks, LinkModel(latency=middle), computing) < bare
        low, high = (middle, high) if is_less else (low, middle)
    return low


def recorded(ranks: LocalExecutor) -> list[Recorded]:
    """Return what each rank does in a step: of three, the one that took neither longest nor shortest."""
    tries = sorted(
        (ranks.call("record", without_waits=True, expected=60.0) for _ in range(3)), key=lambda each: each[0]["seconds"]
    )
    return [
        Recorded(found["seconds"], tuple(TimedMessage(*rest) for _, *rest in found["messages"])) for found in tries[1]
    ]


class Measured(NamedTuple):
    """Seconds of a step on a link, and those of it in which each rank does not wait for messages."""

    seconds: float
    computing: tuple[float, ...]


def measured(ranks: LocalExecutor, link: LinkModel, timed: int) -> Measured:
    """Return the mean of steps on `link`, once they have settled; again, where other processes disturb them."""
    settle = 1 if link == LinkModel() else 2
    for _ in range(TRIES):
        found = ranks.call("measure_waits", (link.latency, link.rate, link.overtake), settle, timed, expected=600.0)
        steps = [statistics.fmean(each.seconds) for each in found]
        if all(each.cores <= PREEMPTED * mean for mean, each in zip(steps, found, strict=True)):
            break
    return Measured(steps[0], tuple(mean - each.messages for mean, each in zip(steps, found, strict=True)))


def links(seen: Recorded, options: argparse.Namespace) -> Iterator[LinkModel]:
    """Yield links of each latency without a limit, and such that the strategy's bytes keep busy for some part."""
    sent = sum(message.num_bytes for message in seen.messages)
    for milliseconds in options.latency or LATENCIES_MS:
        yield LinkModel(latency=1e-3 * milliseconds, overtake=options.overtake)
    for milliseconds in options.latency or LATENCIES_OF_LOADS:
        for load in options.load or LOADS:
            rate = sent / (load * seen.seconds)
            yield LinkModel(latency=1e-3 * milliseconds, rate=rate, overtake=options.overtake)


def rows_of(ranks: LocalExecutor, strategy: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure one strategy on every link, the bare one between any two."""
    ranks.call("prepare", strategy, "sleeping", expected=120.0)
    seen = recorded(ranks)
    before = measured(ranks, LinkModel(), options.steps)
    for link in links(seen[0], options):
        real = measured(ranks, link, options.steps)
        after = measured(ranks, LinkModel(), options.steps)
        computing = [statistics.fmean(pair) for pair in zip(before.computing, after.computing, strict=True)]
        bare = statistics.fmean((before.seconds, after.seconds))
        latency = link.latency + bare_latency(seen, computing, bare)
        found = replayed_step(seen, replace(link, latency=latency), computing)
        yield Row(strategy=strategy, link=link, bare=bare, real=real.seconds, replayed=found)
        before = after
    ranks.call("release", expected=60.0)


COLUMNS = ("strategy", "link", "bare, ms", "real, ms", "replayed, ms", "off")


def cells(row: Row) -> tuple[str, ...]:
    """Return one line of the table."""
    times = [f"{1e3 * each:.0f}" for each in (row.bare, row.real, row.replayed)]
    return (row.strategy, str(row.link), *times, f"{row.off:+.1%}")


def table_row(row: Sequence[str]) -> str:
    """Return cells as a row in Markdown."""
    return f"| {' | '.join(row)} |"


def kept(file: Path | None, measured_now: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of a page, if it is there, of strategies that are not measured now."""
    if file is None or not file.exists():
        return []
    rows = [row for section in contents(file.read_text()) for table in section["tables"] for row in table]
    return [tuple(row[name] for name in COLUMNS) for row in rows if row["strategy"] not in measured_now]


def lines(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the page. Rows are in the order of STRATEGIES."""
    errors = [float(row[-1].rstrip("%")) / 100 for row in rows]
    within = sum(abs(error) <= OFF for error in errors)
    yield "# Replayed steps on delayed links"
    yield ""
    yield (
        "By `python -m benchmarks.forecast.delayed_links`. Two ranks run a small UNet whose layers sleep, behind a "
        "transport that delays messages. `bare`: the step on the link as it is, before and after. `replayed`: what was "
        "recorded on the bare link, with the latency and the rate of the row on top of its own."
    )
    yield ""
    yield (
        f"{within} of {len(rows)} rows within {OFF:.0%}, worst {max(errors, key=abs):+.1%}, mean of sizes "
        f"{statistics.fmean(map(abs, errors)):.1%}."
    )
    yield ""
    yield table_row(COLUMNS)
    yield "|" + "---|" * len(COLUMNS)
    order = {strategy: number for number, strategy in enumerate(STRATEGIES)}
    yield from map(table_row, sorted(rows, key=lambda row: order.get(row[0], len(order))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", action="append", help=f"default: {', '.join(STRATEGIES)}")
    parser.add_argument("--latency", type=float, action="append", help=f"milliseconds; default: {LATENCIES_MS}")
    parser.add_argument("--load", type=float, action="append", help=f"default: {LOADS}, at {LATENCIES_OF_LOADS} ms")
    parser.add_argument("--steps", type=int, default=2, help="timed steps on each link")
    parser.add_argument("--overtake", type=int, default=0, help="bytes that need not queue behind more; 0: one queue")
    parser.add_argument("--write", type=Path, help="also write the page to this file, and keep its other strategies")
    options = parser.parse_args()
    strategies = options.strategy or STRATEGIES
    rows = kept(options.write, strategies)
    with LocalExecutor(
        ["cpu", "cpu"], "benchmarks.overlap.ranks:Bench", preload=("patchpar.pipeline.runner",)
    ) as ranks:
        for strategy in strategies:
            for row in rows_of(ranks, strategy, options):
                rows.append(cells(row))
                print(table_row(rows[-1]), flush=True)
            if options.write:
                write_page("\n".join(lines(rows)) + "\n", options.write)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
