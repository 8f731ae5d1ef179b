"""Replayed steps beside real ones on links of many latencies and rates: two ranks, 8 strategies, 12 links.

    python -m benchmarks.forecast.delayed_links --write docs/figures/delayed-links.md
    python -m benchmarks.forecast.delayed_links --strategy displaced --load 0.6 --latency 5
    chrt -r 20 python -m benchmarks.forecast.delayed_links      # as root, on a machine that does other work, too

Ranks run steps of a small UNet whose layers sleep, which takes no processor time, behind a transport that brings
messages no earlier than a link would. What each rank computes between its exchanges is recorded on the bare link.
Replayed with the latency and the rate of each link, it should take as long as the real step there. On the bare link,
before and after, a step without its waits tells how long ranks compute now, and its waits the latency of that link, by
which messages come below the delayed one, so that this hides it (`delayed_replay`). A rank that has slept for a message
computes longer than on the bare link, where it hardly sleeps: caches of its processor are cold. No link explains that,
so that the step is also replayed with the seconds that ranks compute on this link.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forecast.delayed_replay import RecordedRanks, RecordedTurn, bare_latency, replayed_step
from benchmarks.page import contents, priority, write_page
from patchpar.launch.local import LocalExecutor
from patchpar.pipeline.planner.forecast import steps_of_turn
from patchpar.pipeline.planner.tune.timer import PREEMPTED
from patchpar.plan.link_model import LinkModel, TimedMessage
from patchpar.plan.plan import Plan

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
RECORDED = 5
"""Turns of a strategy; an odd number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy on one link. Seconds of a step.

    `longer`: that ranks compute on this link beyond those on the bare one, the mean of both ranks. `replayed_here`:
    with what they compute on this link; `replayed`: with what they compute on the bare one.
    """

    strategy: str
    link: LinkModel
    bare: float
    real: float
    replayed: float
    longer: float
    replayed_here: float

    @property
    def off(self) -> float:
        """The relative error of the replay."""
        return self.replayed / self.real - 1

    @property
    def off_here(self) -> float:
        """That of the waits alone: of the replay with what ranks compute on this link."""
        return self.replayed_here / self.real - 1


def recorded(ranks: LocalExecutor, strategy: str) -> RecordedRanks:
    """Return what the ranks do in a turn: of several, the median of each time."""
    steps = steps_of_turn(Plan(patch=2, strategy=strategy))
    turns = [ranks.call("record", steps, without_waits=True, expected=60.0) for _ in range(RECORDED)]
    return RecordedRanks.of(steps, [list(map(_turn, of_ranks)) for of_ranks in turns])


def _turn(found: Mapping[str, Any]) -> RecordedTurn:
    messages = tuple(TimedMessage(*times) for _, *times in found["messages"])
    return RecordedTurn(seconds=found["seconds"], messages=messages, waits=tuple(found["waits"]))


class Measured(NamedTuple):
    """Seconds of a step on a link, and those of it in which each rank does not wait for messages."""

    seconds: float
    computing: tuple[float, ...]


def measured(ranks: LocalExecutor, link: LinkModel, timed: int) -> Measured:
    """Return the mean of steps on `link`, once they have settled.

    Again, where other processes disturb them; of TRIES that were disturbed, those with the shortest waits for cores.
    """
    settle = 1 if link == LinkModel() else 2
    tries: list[tuple[float, Measured]] = []
    while len(tries) < TRIES and all(disturbed > PREEMPTED for disturbed, _ in tries):
        found = ranks.call("measure_waits", (link.latency, link.rate, link.overtake), settle, timed, expected=600.0)
        steps = [statistics.fmean(each.seconds) for each in found]
        computing = tuple(mean - each.messages for mean, each in zip(steps, found, strict=True))
        disturbed = max(each.cores / mean for mean, each in zip(steps, found, strict=True))
        tries.append((disturbed, Measured(steps[0], computing)))
    return min(tries)[1]


def links(seen: RecordedRanks, options: argparse.Namespace) -> Iterator[LinkModel]:
    """Yield links of each latency without a limit, and such that the strategy's bytes keep busy for some part."""
    sent = sum(message.num_bytes for message in seen.ranks[0].messages)
    for milliseconds in options.latency or LATENCIES_MS:
        yield LinkModel(latency=1e-3 * milliseconds)
    for milliseconds in options.latency or LATENCIES_OF_LOADS:
        for load in options.load or LOADS:
            rate = sent / (load * seen.ranks[0].seconds)
            yield LinkModel(latency=1e-3 * milliseconds, rate=rate)


def rows_of(ranks: LocalExecutor, strategy: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure one strategy on every link, the bare one between any two; of several rounds the median by its error."""
    ranks.call("prepare", strategy, "sleeping", expected=120.0)
    seen = recorded(ranks, strategy)
    timed = -(-options.steps // seen.steps) * seen.steps
    before = measured(ranks, LinkModel(), timed)
    for link in links(seen, options):
        rounds: list[Row] = []
        for _ in range(options.rounds):
            real, after = measured(ranks, link, timed), measured(ranks, LinkModel(), timed)
            rounds.append(compared(strategy, seen, link, real, (before, after)))
            before = after
        yield sorted(rounds, key=lambda row: row.off)[len(rounds) // 2]
    ranks.call("release", expected=60.0)


def compared(
    strategy: str, seen: RecordedRanks, link: LinkModel, real: Measured, bare: tuple[Measured, Measured]
) -> Row:
    """Return a `real` step beside its replays, between two measurements on the bare link."""
    computing = [statistics.fmean(pair) for pair in zip(*(each.computing for each in bare), strict=True)]
    seconds = statistics.fmean(each.seconds for each in bare)
    below = bare_latency(seen, computing, seconds)
    return Row(
        strategy=strategy,
        link=link,
        bare=seconds,
        real=real.seconds,
        replayed=replayed_step(seen, link, computing, below),
        longer=statistics.fmean(real.computing) - statistics.fmean(computing),
        replayed_here=replayed_step(seen, link, real.computing, below),
    )


OFF_CELL, OFF_HERE_CELL = "off", "with it, off"
COLUMNS = ("strategy", "link", "bare, ms", "real, ms", "replayed, ms", OFF_CELL, "computes longer, ms", OFF_HERE_CELL)


def cells(row: Row) -> tuple[str, ...]:
    """Return one line of the table."""
    times = [f"{1e3 * each:.0f}" for each in (row.bare, row.real, row.replayed)]
    return (row.strategy, str(row.link), *times, f"{row.off:+.1%}", f"{1e3 * row.longer:+.0f}", f"{row.off_here:+.1%}")


def table_row(row: Sequence[str]) -> str:
    """Return cells as a row in Markdown."""
    return f"| {' | '.join(row)} |"


def kept(file: Path | None, measured_now: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of a page, if it is there and has these columns, of strategies that are not measured now."""
    if file is None or not file.exists():
        return []
    rows = [row for section in contents(file.read_text()) for table in section["tables"] for row in table]
    alike = [row for row in rows if row.keys() >= set(COLUMNS) and row["strategy"] not in measured_now]
    return [tuple(row[name] for name in COLUMNS) for row in alike]


def lines(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the page. Rows are in the order of STRATEGIES."""
    yield "# Replayed steps on delayed links"
    yield ""
    yield (
        "By `python -m benchmarks.forecast.delayed_links`. Two ranks run a small UNet whose layers sleep, behind a "
        "transport that delays messages. `bare`: the step on the link as it is, before and after. `replayed`: what was "
        "recorded on the bare link, where messages arrive no earlier than by the latency and the rate of the row. "
        "`computes longer`: than on the bare link, since a processor is slower after a sleep; what no link explains. "
        "`with it`: replayed with what ranks compute on this link, so that the waits alone are predicted. Of three "
        f"rounds each row is the one with the median error.{priority()}"
    )
    yield ""
    yield f"{_within(rows, OFF_CELL)}. With what ranks compute on each link: {_within(rows, OFF_HERE_CELL)}."
    yield ""
    yield table_row(COLUMNS)
    yield "|" + "---|" * len(COLUMNS)
    order = {strategy: number for number, strategy in enumerate(STRATEGIES)}
    yield from map(table_row, sorted(rows, key=lambda row: order.get(row[0], len(order))))


def _within(rows: Sequence[tuple[str, ...]], name: str) -> str:
    errors = [float(row[COLUMNS.index(name)].rstrip("%")) / 100 for row in rows]
    within = sum(abs(error) <= OFF for error in errors)
    sizes = statistics.fmean(map(abs, errors))
    return (
        f"{within} of {len(rows)} rows within {OFF:.0%}, worst {max(errors, key=abs):+.1%}, mean of sizes {sizes:.1%}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", action="append", help=f"default: {', '.join(STRATEGIES)}")
    parser.add_argument("--latency", type=float, action="append", help=f"milliseconds; default: {LATENCIES_MS}")
    parser.add_argument("--load", type=float, action="append", help=f"default: {LOADS}, at {LATENCIES_OF_LOADS} ms")
    parser.add_argument("--steps", type=int, default=2, help="timed steps on each link, at least")
    parser.add_argument("--rounds", type=int, default=3, help="of each link, of which the median counts")
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
