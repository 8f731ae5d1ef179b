"""Count what one rank of every strategy does on GPUs in a call of SDXL and of FLUX, without a GPU.

python -m benchmarks.gpu.count --host-time --write docs/figures/gpu-counts.md
python -m benchmarks.gpu.count --write docs/figures/gpu-counts.md                      # times stay as they are there
python -m benchmarks.gpu.count --only-host-time --write docs/figures/gpu-counts.md     # counts stay as they are there
python -m benchmarks.gpu.count --models flux --strategies "exact;fresh-edges" --short     # a quick look
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.battery.environment import commit_of
from benchmarks.gpu.denoisers import DENOISERS, NAMES, SHORT
from benchmarks.gpu.host_time import ROUNDS, HostTime, exchange_times, host_times
from benchmarks.gpu.quiet import quiet_process
from benchmarks.gpu.recorder import CallCounts
from benchmarks.gpu.strategies import CFG, fake_rank
from benchmarks.page import publish, sections_of

FRESH = ("fresh-edges", "fresh-edges:correction=none", "fresh-edges:context=pooled", "fresh-edges:correction=linear")
STRATEGIES = {
    "sdxl": ("exact", "displaced", "pcpp", *FRESH, CFG),
    "flux": ("exact", "exact:ulysses=4", "exact:attention=ring", "displaced", "pcpp", *FRESH),
}
MIB = 2**20
ROOT = Path(__file__).parents[2]
PAIRS = 96  # in rounds of 16
PYTHON_GOAL = 40  # microseconds of Python for an exchange
INTRODUCTION = """\
# Counts on GPUs

Counted **without a GPU**: one rank runs the real network on fake tensors of a CUDA device, and torch.distributed \
sends nothing. Every launch, message and wait is counted as the process makes it; none is timed. A launch is an \
operator that is neither a view nor an empty allocation; a group norm is three (two without weights), a convolution \
two, an operator of patchpar's own one, and so is a root mean square norm of torch, as in torch 2.9 and newer. An \
operation is a message that is sent or received, or a collective. A synchronisation is a place where the process \
waits for the device: reading a value, a blocking copy, a wait for a message. `peak` and `held` are MiB of the device \
during the call, and after it for the next; weights and arguments are not counted, messages on their way are.

Strategies with stale values run an exact step first; `stale` is a step like all later ones."""

HOST_TIME = "Time of the process"
NO_HOST_TIME = """\
The time of the process is not measured here: `python -m benchmarks.gpu.count --host-time` adds it, on a machine that \
does nothing else."""


def model_lines(model: str, size: int, world: int, strategies: Sequence[str], *, short: bool) -> Iterator[str]:
    """Yield the section of one model."""
    shortened = ", with fewer layers" if short else ""
    yield f"## {NAMES[model]}, {size} x {size}{shortened}"
    yield ""
    yield f"Rank 1 of {world}; of the guidance split, rank 1 of 2."
    yield ""
    yield (
        "| strategy | step | launches | of plain | groups | operations | MiB sent | synchronisations | host copies "
        "| events | allocations | peak | held |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    locations: Counter[str] = Counter()
    for strategy, step, counts, plain in counted(model, size, world, strategies, short=short):
        yield row(strategy, step, counts, plain)
        locations.update({f"{strategy}, {step}: {location}": number for location, number in counts.syncs.items()})
    if locations:
        yield ""
        yield from (f"- {number} x {location}" for location, number in locations.items())


def counted(
    model: str, size: int, world: int, strategies: Sequence[str], *, short: bool = False
) -> Iterator[tuple[str, str, CallCounts, CallCounts]]:
    """Yield strategy, kind of step, its counts, and those of the plain model."""
    with fake_rank(1, world) as rank:
        denoiser = DENOISERS[model](size, layers=SHORT[model] if short else None)
        plain = rank.plain(denoiser)
        yield "plain", "", plain, plain
        for strategy in strategies:
            for step, counts in rank.steps(denoiser, strategy).items():
                yield strategy, step, counts, plain


def row(strategy: str, step: str, counts: CallCounts, plain: CallCounts) -> str:
    """Return a line of the table."""
    launches = sum(counts.launches.values())
    cells = (
        f"`{strategy}`" if step else strategy,
        step,
        f"{launches:,}",
        f"{launches / sum(plain.launches.values()):.2f}",
        counts.groups,
        f"{sum(counts.operations.values()):,}",
        f"{sum(counts.bytes_out.values()) / MIB:,.0f}",
        sum(counts.syncs.values()),
        sum(counts.copies.values()),
        counts.events,
        f"{counts.allocations:,}",
        f"{counts.peak / MIB:,.0f}",
        f"{counts.held / MIB:,.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def host_lines(world: int, pairs: int, models: Sequence[str], chosen: Sequence[str] | None) -> Iterator[str]:
    """Yield the section on the time of the process."""
    yield f"## {HOST_TIME}"
    yield ""
    yield (
        f"Rank 1 of {world}, measured: networks as deep as these, so narrow that only Python and the launches count. "
        "Tensors are on the CPU. A kernel of patchpar's own is one call, as on a GPU: all of its Python runs up to the "
        "launch, which is left out, and so is what Triton takes for it. Messages go nowhere, but all Python of "
        f"torch.distributed runs. {pairs} pairs of steps in processor time: the plain step of the same band, and the "
        f"split one right after it, in strictly alternating turns. Each strategy has them in {ROUNDS} rounds, between "
        "those of the others. A machine that is slow for a while slows both of a pair; the quarter of the pairs that "
        "took the least time counts, which others slowed least. `of plain` is the median over these pairs of the "
        "second's time by the first's, and half of them are between the `quartiles`; milliseconds are medians, and "
        "what an exchange adds is the median of the pairs' differences. `calls`: functions written in Python that an "
        "exchange point adds, with the layer around it; no machine changes them."
    )
    yield ""
    yield (
        f"Measured on {datetime.now(timezone.utc):%d %B %Y}, commit {commit_of(ROOT)}; the counts above may "
        "be of a later one."
    )
    yield ""
    yield (
        "| model | strategy | plain, ms | split, ms | of plain | quartiles | exchanges | added by each, µs | calls |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for model in models:
        strategies = [strategy for strategy in chosen or STRATEGIES[model] if strategy != CFG]
        for strategy, found in host_times(model, 1, world, strategies, pairs).items():
            yield f"| {model} | `{strategy}` | {host_cells(found)} |"
    yield ""
    yield (
        "A single exchange from start to the end of the wait, without the layer around it. `torch`: the collective, "
        "the operators and the events of the stream, called one after the other without patchpar, in pairs with the "
        "exchange. `Python` is what the exchange takes longer, patchpar's own; the goal is at most "
        f"{PYTHON_GOAL} µs. Medians of the quarter of the pairs that took the least time. The plain model has no "
        "exchange, and a step that is replayed as a graph runs none of this."
    )
    yield ""
    yield "| exchange | µs | torch, µs | Python, µs | calls |"
    yield "|---|---|---|---|---|"
    for name, found in exchange_times(1, world, pairs).items():
        times = " | ".join(f"{seconds * 1e6:.0f}" for seconds in (found.whole, found.torch, found.python))
        yield f"| {name} | {times} | {found.calls} |"


def host_cells(found: HostTime) -> str:
    """Return the cells of the times of a strategy."""
    times = found.times
    lower, upper = times.quartiles
    ratios = f"{times.ratio:.2f} | {lower:.2f} to {upper:.2f}"
    added = f"{found.exchanges} | {found.added * 1e6:.0f} | {found.calls:.0f}"
    return f"{times.first * 1e3:.0f} | {times.second * 1e3:.0f} | {ratios} | {added}"


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the page."""
    if options.only_host_time:
        yield from counts_of(options.write)
        yield from host_lines(options.world, PAIRS, options.models, options.strategies)
        return
    kept = host_time_of(options.write)
    yield INTRODUCTION
    if find_spec("triton") is None:
        yield ""
        yield "Triton is not installed here, so that the operators of patchpar's own are counted as their eager twins."
    for model in options.models:
        strategies = options.strategies or STRATEGIES[model]
        yield ""
        yield from model_lines(model, options.size, options.world, strategies, short=options.short)
    if options.host_time:
        yield ""
        yield from host_lines(options.world, PAIRS, options.models, options.strategies)
    else:
        yield ""
        yield from kept or (NO_HOST_TIME,)


def counts_of(page: Path) -> Iterator[str]:
    """Yield the lines of a page that is there, up to the time of the process."""
    for line in page.read_text().splitlines():
        if line in (f"## {HOST_TIME}", NO_HOST_TIME):
            return
        yield line


def host_time_of(page: Path | None) -> list[str]:
    """Return the section on the time of the process of a page, with the day and the commit of its figures.

    Empty where there is no such page or section.
    """
    found = {} if page is None else sections_of(page)
    return [f"## {HOST_TIME}", "", *found[HOST_TIME].splitlines()] if HOST_TIME in found else []


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(DENOISERS), default=list(DENOISERS))
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--world", type=int, default=4, help="number of ranks")
    parser.add_argument("--strategies", type=lambda text: text.split(";"), help="several with ; between them")
    parser.add_argument("--short", action="store_true", help="with few layers, for a quick look")
    parser.add_argument("--host-time", action="store_true", help="also measure the time of the process")
    parser.add_argument("--only-host-time", action="store_true", help="measure that alone, for the page to --write")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    if options.only_host_time and options.write is None:
        parser.error("--only-host-time needs --write, a page with the counts")
    quiet_process(threads=1)
    publish(lines(options), options.write)


if __name__ == "__main__":
    main()
