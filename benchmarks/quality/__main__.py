"""What stale and partial exchange costs in quality, and what it saves: real ranks against one process, per method.

    python -m benchmarks.quality --quick                                8 captions, 256 x 256, DDIM, 4 ranks
    python -m benchmarks.quality                                        everything; days on two cores
    python -m benchmarks.quality --strategy pcpp --strategy frozen --ranks 4 --size 512x512 --steps 20
    python -m benchmarks.quality --model assets/scenes-dit --scheduler flow --strategy displaced --strategy naive
    python -m benchmarks.quality --table --plot                         no generation: documents of what is known

Images of held-out captions by the embedded model are compared before they are rounded to 8 bits with those of plain
diffusers in one process: same captions, same seeds, same scheduler. Every image is a line in a file, and what is in
the file is not generated again: interrupt it, run it in pieces, add captions later. Rows that the table has and
the file lacks, or has of fewer captions, stay as they are; a row of 8 captions is made one of 32 by drawing the others,
`--first 8 --captions 32`, in a file of their own or not. "naive" lets every band work alone, "frozen" (with the
options of displaced) sends nothing after the synchronous steps: the negative controls.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.quality.bench import REPOSITORY, Bench
from benchmarks.quality.generation import SCHEDULERS, Caption, Meter, OneProcess, hash_of
from benchmarks.quality.known import rows_of_page, with_measured
from benchmarks.quality.plot import write_plot
from benchmarks.quality.records import ONE_PROCESS, Named, Record, Records, Setting
from benchmarks.quality.table import Row, rows_of, write_table
from patchpar.cli.bench.lpips import Lpips, fetch
from patchpar.errors import PlanError
from patchpar.models.files import embedded_model
from training.classifier import load_classifier
from training.scenes import held_out_captions

TABLE, PLOT = REPOSITORY / "docs/figures/quality.md", REPOSITORY / "assets/figures/quality.svg"
GUIDANCE, SEED = 3.5, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What is generated where a flag is not given. Sizes are height x width in pixels."""

    strategy: tuple[str, ...]
    ranks: tuple[int, ...]
    size: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]
    scheduler: tuple[str, ...]
    captions: int


FULL = Defaults(
    strategy=(
        "naive",
        "frozen",
        "displaced:group_norm=separate",
        "displaced:group_norm=stale",
        "displaced:preset=paper",
        "displaced",
        "displaced:group_norm=guarded",
        "displaced:group_norm=sync",
        "pcpp",
        "pcpp:context=paper",
        "fresh-edges",
        "fresh-edges:context=pooled",
        "fresh-edges:context=partials",
        "fresh-edges:bits=8",
        "exact",
    ),
    ranks=(2, 4, 8),
    size=((512, 512), (512, 768), (256, 256)),
    steps=(8, 10, 20, 50),
    scheduler=("DDIM", "DPM++ 2M"),
    captions=32,
)
QUICK = Defaults(
    strategy=("naive", "frozen", "displaced:preset=paper", "pcpp", "fresh-edges", "fresh-edges:context=pooled"),
    ranks=(4,),
    size=((256, 256),),
    steps=(20,),
    scheduler=("DDIM",),
    captions=8,
)


def size_of(text: str) -> tuple[int, int]:
    """Height and width in pixels, of "512x768"."""
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no height x width, such as 512x768")
    return int(height), int(width)


def count_of(text: str) -> int:
    """A number of at least 1."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def strategy_of(text: str) -> str:
    """The text of a method that exists."""
    try:
        Named.parse(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Selections are None where not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", type=strategy_of, action="append", help=f"such as {', '.join(FULL.strategy)}")
    parser.add_argument("--ranks", type=count_of, action="append", help=f"default {FULL.ranks}")
    parser.add_argument("--size", type=size_of, action="append", help="height x width in pixels, such as 512x768")
    parser.add_argument("--steps", type=count_of, action="append", help=f"default {FULL.steps}")
    parser.add_argument("--scheduler", choices=SCHEDULERS, action="append")
    parser.add_argument("--captions", type=count_of, help=f"how many, default {FULL.captions}")
    parser.add_argument(
        "--first", type=count_of, default=0, help="leave out captions before this one: the table has them"
    )
    parser.add_argument("--quick", action="store_true", help="smaller defaults")
    parser.add_argument("--again", action="store_true", help="generate again what the file knows; the new lines count")
    parser.add_argument("--batch", type=count_of, default=8, help="captions generated together")
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--seed", type=int, default=SEED, help="of the first caption")
    parser.add_argument("--threads", type=count_of, default=1, help="of the one process")
    parser.add_argument("--model", type=Path, default=embedded_model(), help="pipeline folder")
    parser.add_argument("--records", type=Path, default=REPOSITORY / "runs/quality/records.jsonl")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / "runs/quality", help="exact images, LPIPS")
    parser.add_argument("--lpips", default="fetch", help='file of weights, "fetch" (62 MB, once), or "none"')
    for name, path in (("table", TABLE), ("plot", PLOT)):
        reported = f"write {path.relative_to(REPOSITORY)}"
        parser.add_argument(f"--{name}", type=Path, nargs="?", const=path, help=reported)
    options = parser.parse_args(arguments)
    if options.first >= (captions := options.captions or (QUICK if options.quick else FULL).captions):
        parser.error(f"--first {options.first} leaves nothing of {captions} captions")
    return options


def with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    """The same, with what was not given."""
    defaults = QUICK if options.quick else FULL
    given = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**{name: getattr(defaults, name) for name in Defaults.__slots__} | given)


def settings_of(options: argparse.Namespace, model: str) -> Iterator[Setting]:
    """Every setting that was asked for, of the model with that hash."""
    for (height, width), scheduler, steps in itertools.product(options.size, options.scheduler, options.steps):
        yield Setting(
            model=model,
            height=height,
            width=width,
            steps=steps,
            scheduler=scheduler,
            guidance=options.guidance,
            seed=options.seed,
        )


def selected(rows: Sequence[Row], options: argparse.Namespace, model: str) -> list[Row]:
    """The rows of this model that the flags, as far as they were given, speak of; one process always."""
    methods = options.strategy and {ONE_PROCESS, *(Named.parse(label).method for label in options.strategy)}
    return [
        row
        for row in rows
        if row.setting.model == model
        and (options.size is None or (row.setting.height, row.setting.width) in options.size)
        and (options.steps is None or row.setting.steps in options.steps)
        and (options.scheduler is None or row.setting.scheduler in options.scheduler)
        and (options.ranks is None or row.ranks in (1, *options.ranks))
        and (methods is None or row.method in methods)
    ]


def lpips_of(choice: str, cache: Path) -> Lpips | None:
    """LPIPS from a file, or fetched; None, and a word about it, where it cannot be had."""
    if choice == "none":
        return None
    if choice != "fetch":
        return Lpips(Path(choice))
    try:
        return Lpips(fetch(cache))
    except RuntimeError as error:
        print(f"LPIPS is not measured: {error}", file=sys.stderr, flush=True)
        return None


def bench_of(options: argparse.Namespace, records: Records) -> Bench:
    """Everything that drawing needs."""
    held_out = enumerate(held_out_captions(options.captions))
    return Bench(
        model=options.model,
        one=OneProcess(options.model, options.cache),
        meter=Meter(load_classifier(), lpips_of(options.lpips, options.cache)),
        records=records,
        captions=[Caption(index=index, text=text, scene=scene) for index, (text, scene) in held_out][options.first :],
        batch=options.batch,
        again=options.again,
    )


def write_documents(options: argparse.Namespace, records: Sequence[Record], model: str) -> int:
    """Table and plot, as far as they were asked for. Returns the exit code.

    The table keeps what it has, of earlier weights of the model too; flags say what is added. The plot shows what they
    speak of.
    """
    try:
        page = rows_of_page(options.table or TABLE)
        rows = with_measured(page, selected(rows_of(records), options, model))
        if options.table:
            write_table(options.table, rows, model)
        if options.plot:
            write_plot(options.plot, selected(rows, options, model))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def main() -> int:
    """Measure, or write down what is known."""
    options = parse()
    records, model = Records(options.records), hash_of(options.model)
    if options.table or options.plot:
        return write_documents(options, records.all(), model)
    options = with_defaults(options)
    torch.set_num_threads(options.threads)
    methods = [Named.parse(label) for label in options.strategy]
    bench = bench_of(options, records)
    try:
        return 1 if bench.measure(list(settings_of(options, model)), methods, options.ranks) else 0
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with what {options.records} lacks", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
