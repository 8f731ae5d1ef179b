"""What each strategy hides of a slow link, against what the model of `patchpar.plan.link_model` says.

    python -m benchmarks.overlap --write docs/figures/overlap.md
    python -m benchmarks.overlap --strategy displaced --load 0.6 --latency 5     one strategy, two links

Two ranks of one thread each run steps of `benchmarks.scaling.large` behind a transport that brings messages no earlier
than a link of some latency and rate would. Loads are what a strategy's own bytes take on the link over its step on the
bare one. Steps on the bare link come before and after those on every slow one, and medians are compared.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import write_page
from patchpar.launch.local import LocalExecutor
from patchpar.plan.link_model import EXPOSED_FRACTION, LinkModel, TimedMessage, edges_for, link_seconds, step_seconds

STRATEGIES = ("exact", "displaced", "pcpp", "fresh-edges", "fresh-edges:context=pooled")
STALE = ("displaced", "pcpp")  # these are held to hiding what a link needs
LATENCIES_MS = (0.2, 1.0, 5.0, 20.0)
LOADS = (0.3, 0.6, 1.0, 1.5)
LATENCY_OF_LOADS = 2e-4
HIDDEN, OFF = 0.9, 0.15
LEAST_BUSY = 0.25
NOISE = 5.0  # a link time of fewer spreads of the step times is not judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy on one link. Seconds."""

    strategy: str
    link: LinkModel
    bare: float
    spread: float
    slow: float
    link_time: float
    predicted: float

    @property
    def extra(self) -> float:
        """What the link adds to a step."""
        return self.slow - self.bare

    @property
    def hidden(self) -> float:
        """The share of the link time that does not show in the step."""
        return 1 - self.extra / self.link_time

    @property
    def off(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.slow - 1

    @property
    def is_judged(self) -> bool:
        """Whether the strategy is held to hide this much, and it can be told from noise.

        What takes less than a quarter of a step disappears in how much steps differ by themselves.
        """
        reported = NOISE * self.spread < self.link_time and self.busy >= LEAST_BUSY
        return self.strategy in STALE and reported and self.busy <= 1.0

    @property
    def busy(self) -> float:
        """Link time over step time."""
        return self.link_time / self.bare


@dataclass(frozen=True, slots=True)
class Profile:
    """A strategy's exchanges in one step on the bare link, and how long that step took."""

    seconds: float
    points: tuple[str, ...]
    messages: tuple[TimedMessage, ...]

    @property
    def num_bytes(self) -> float:
        """Bytes that leave a rank in a step."""
        return sum(message.num_bytes for message in self.messages)

    @property
    def edges(self) -> list[TimedMessage]:
        """What is waited for in the same step, but for the prediction."""
        return [m for point, m in zip(self.points, self.messages, strict=True) if not m.age and point != "prediction"]

    def at(self, seconds: float) -> list[TimedMessage]:
        """The same exchanges in a step of `seconds`."""
        scale = seconds / self.seconds
        return [TimedMessage(m.sent * scale, m.needed * scale, m.num_bytes, m.age) for m in self.messages]


def profile(ranks: LocalExecutor) -> Profile:
    """Record one step of what is prepared: of three, the one that took neither longest nor shortest."""
    found = sorted((ranks.call("record", expected=60.0)[0] for _ in range(3)), key=lambda each: each["seconds"])[1]
    points = tuple(point for point, *_ in found["messages"])
    return Profile(found["seconds"], points, tuple(TimedMessage(*rest) for _, *rest in found["messages"]))


def links(seen: Profile, options: argparse.Namespace) -> Iterator[LinkModel]:
    """Links by latency alone, and links that the strategy's bytes keep busy for some part of its step."""
    for milliseconds in options.latency or LATENCIES_MS:
        yield LinkModel(latency=1e-3 * milliseconds, overtake=options.overtake)
    for load in options.load or LOADS:
        rate = seen.num_bytes / (load * seen.seconds)
        yield LinkModel(latency=LATENCY_OF_LOADS, rate=rate, overtake=options.overtake)


def measure(ranks: LocalExecutor, link: LinkModel, timed: int) -> list[float]:
    """Seconds of each step on `link`, once they have settled."""
    settle = 1 if link == LinkModel() else 2
    return ranks.call("measure", (link.latency, link.rate, link.overtake), settle, timed, expected=600.0)[0]


def rows_of(ranks: LocalExecutor, strategy: str, options: argparse.Namespace) -> tuple[Profile, list[Row]]:
    """Measure one strategy on every link, the bare one between any two."""
    ranks.call("prepare", strategy, options.model, expected=120.0)
    seen = profile(ranks)
    chosen, rows = list(links(seen, options)), []
    before = measure(ranks, LinkModel(), options.steps)
    for link in chosen:
        slow = statistics.median(measure(ranks, link, options.steps))
        after = measure(ranks, LinkModel(), options.steps)
        bare = statistics.median([*before, *after])
        messages = seen.at(bare)
        rows.append(
            Row(
                strategy=strategy,
                link=link,
                bare=bare,
                spread=statistics.median(abs(each - bare) for each in (*before, *after)),
                slow=slow,
                link_time=link_seconds(messages, link),
                predicted=step_seconds(bare, messages, link),
            )
        )
        print(line(rows[-1]), flush=True)
        before = after
    ranks.call("release", expected=60.0)
    return seen, rows


TITLES = (
    "strategy",
    "link",
    "bare, s",
    "slow, s",
    "extra, s",
    "link time, s",
    "of a step",
    "hidden",
    "model, s",
    "off",
)


def line(row: Row) -> str:
    """One line of the first table."""
    cells = (
        row.strategy,
        str(row.link),
        f"{row.bare:.3f}",
        f"{row.slow:.3f}",
        f"{row.extra:+.3f}",
        f"{row.link_time:.3f}",
        f"{row.busy:.2f}",
        f"{row.hidden:.0%}" if row.link_time > NOISE * row.spread else "in the noise",
        f"{row.predicted:.3f}",
        f"{row.off:+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def claims(rows: Sequence[Row]) -> Iterator[str]:
    """What is promised, and whether it is kept."""
    for strategy in STALE:
        judged = [row for row in rows if row.strategy == strategy and row.is_judged]
        if judged:
            worst = min(judged, key=lambda row: row.hidden)
            yield (
                f"- {strategy} hides at least {HIDDEN:.0%} of what the link needs, up to the step time: "
                f"{_kept(worst.hidden >= HIDDEN)}, at worst {worst.hidden:.1%} ({worst.link}; {len(judged)} links)"
            )
    worst = max(rows, key=lambda row: abs(row.off))
    yield (
        f"- the model is within {OFF:.0%} of the measured step: {_kept(abs(worst.off) <= OFF)}, at worst "
        f"{worst.off:+.1%} ({worst.strategy}, {worst.link}; {len(rows)} rows)"
    )
    for row in (row for row in rows if row.strategy == "exact" and row.busy >= LEAST_BUSY):
        yield f"- exact on {row.link}: {row.extra:+.3f} s, {row.extra / row.bare:.0%} of its step"


def _kept(kept: bool) -> str:
    return "met" if kept else "MISSED"


def rule(ranks: LocalExecutor, options: argparse.Namespace) -> Iterator[str]:
    """Fresh and stale edges on the same links, and which of the two the planner's rule takes."""
    profiles: dict[str, Profile] = {}
    found: dict[str, list[float]] = {}
    chosen: list[LinkModel] = []
    for strategy in ("fresh-edges", "displaced"):
        ranks.call("prepare", strategy, options.model, expected=120.0)
        profiles[strategy] = profile(ranks)
        chosen = chosen or list(links(profiles[strategy], options))
        found[strategy] = [statistics.median(measure(ranks, link, options.steps)) for link in (LinkModel(), *chosen)]
        ranks.call("release", expected=60.0)
    seen, bare = profiles["fresh-edges"], found["displaced"][0]
    rounds, edge_bytes = len(seen.edges), sum(message.num_bytes for message in seen.edges)
    queued = 0 if options.overtake else sum(message.num_bytes for message in seen.messages if message.age)
    titles = ("link", "fresh edges, s", "stale edges, s", "fresh edges cost", "the rule says", "right")
    yield f"{rounds} rounds of edges, {edge_bytes / 2**20:.2f} MiB from each rank in a step."
    yield from ("", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|")
    for link, fresh, stale in zip((LinkModel(), *chosen), found["fresh-edges"], found["displaced"], strict=True):
        choice = edges_for(link, rounds=rounds, edge_bytes=edge_bytes, step_seconds=bare, queued_bytes=queued).edges
        cost = (fresh - stale) / bare
        right = (choice == "fresh") == (cost <= EXPOSED_FRACTION)
        yield f"| {link} | {fresh:.3f} | {stale:.3f} | {cost:+.1%} | {choice} | {'yes' if right else 'NO'} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", action="append", help=f"default: {', '.join(STRATEGIES)}")
    parser.add_argument(
        "--model", choices=WHAT, default="large", help="large, or sleeping where the cores are not idle"
    )
    parser.add_argument("--latency", type=float, action="append", help=f"milliseconds; default: {LATENCIES_MS}")
    parser.add_argument("--load", type=float, action="append", help=f"default: {LOADS}")
    parser.add_argument("--steps", type=int, default=3, help="timed steps on each link")
    parser.add_argument("--overtake", type=int, default=0, help="bytes that need not queue behind more; 0: one queue")
    parser.add_argument("--no-rule", action="store_true", help="leave out the table on the rule for edges")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    text = ["# What is hidden of a slow link", "", INTRO.format(what=WHAT[options.model], queue=queue_of(options)), ""]
    text += [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    with LocalExecutor(
        ["cpu", "cpu"], "benchmarks.overlap.ranks:Bench", preload=("patchpar.pipeline.runner",)
    ) as ranks:
        for strategy in options.strategy or STRATEGIES:
            rows += rows_of(ranks, strategy, options)[1]
        text += [*map(line, rows), "", *claims(rows)]
        if not options.no_rule:
            text += ["", "## Fresh or stale edges", "", *rule(ranks, options)]
    print("\n".join(text))
    if options.write:
        write_page("\n".join(text) + "\n", options.write)


WHAT = {
    "large": "a UNet of more than a second a step",
    "sleeping": "a small UNet whose layers sleep on top of computing (busy cores, not the model of the guarantees)",
}
INTRO = """Two ranks on two cores, {what}, behind a link that delays every message.
`bare` is the same strategy's step on the link as it is, in the same run; `link time` is latency times rounds plus bytes
over rate, what the exchanges of a step need if each is waited for; `hidden` the share of that which does not show;
`model` is what `patchpar.plan.link_model` says of the recorded exchanges, `off` its error.
{queue}"""


def queue_of(options: argparse.Namespace) -> str:
    """How messages of a rank share its link, in a sentence."""
    if options.overtake:
        return f"A rank's messages share one link; those of up to {options.overtake >> 10} KiB overtake larger ones."
    return "A rank's messages leave one after the other."


if __name__ == "__main__":
    main()
