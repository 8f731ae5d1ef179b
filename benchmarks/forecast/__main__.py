"""Print the page of forecasts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.forecast import __doc__ as usage
from benchmarks.forecast import batches, cpu_prices, measured, published, published_plans, published_rows, tables
from benchmarks.forecast.recorded import RecordedModel
from benchmarks.gpu.quiet import quiet_process
from benchmarks.page import publish
from patchpar.errors import PlanError


class RecordedModels(dict[str, RecordedModel]):
    """Models by name, made when they are first asked for."""

    def __init__(self, makers: dict[str, Callable[..., object]]) -> None:
        super().__init__()
        self._makers = makers

    def __missing__(self, name: str) -> RecordedModel:
        self[name] = RecordedModel(self._makers[name])  # type: ignore[arg-type]
        return self[name]


def lines(names: Sequence[str], machines: Sequence[str]) -> Iterator[str]:
    """Yield the page of the catalogue."""
    yield "# Forecasts"
    yield ""
    yield "By `python -m benchmarks.forecast`. [The simulator](../simulator.md) says how times are predicted."
    yield ""
    yield "## Published times of one device"
    yield ""
    yield from published.lines(RecordedModels(dict(published_rows.MODELS)))
    yield ""
    yield "## Published steps in batches"
    yield ""
    yield from batches.lines(RecordedModels(dict(batches.MODELS)))
    yield ""
    yield "## Published times of several devices"
    yield ""
    yield from published_plans.lines(RecordedModels(dict(published_plans.MODELS)))
    yield ""
    yield "## Measured on a GPU"
    yield ""
    yield from measured.lines(RecordedModels(dict(measured.MODELS)))
    yield ""
    subjects = RecordedModels({name: each.model for name, each in tables.SUBJECTS.items()})
    yield from tables.lines(subjects, names, machines)


def prices() -> Iterator[str]:
    """Yield the page of this CPU."""
    yield "# Prices of calls on a CPU"
    yield ""
    tune = "[`patchpar tune`](../simulator.md#measure-this-machine)"
    yield f"By `python -m benchmarks.forecast --cpu`, in the way of {tune}."
    yield ""
    yield from cpu_prices.lines()


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(tables.SUBJECTS), default=list(tables.SUBJECTS))
    parser.add_argument("--machines", nargs="+", default=tables.MACHINES, metavar="NAME")
    parser.add_argument("--cpu", action="store_true", help="measure prices on this CPU instead")
    parser.add_argument("--write", type=Path, help="also write the page to this file")
    options = parser.parse_args()
    quiet_process(threads=1)
    try:
        publish(prices() if options.cpu else lines(options.models, options.machines), options.write)
    except PlanError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
