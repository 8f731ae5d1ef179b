"""Transformers with their tokens split: two ranks of one thread against one process of one thread, call by call.

    python -m benchmarks.tokens --write docs/figures/tokens.md     minutes, on an otherwise idle machine
    python -m benchmarks.tokens --quick                            toys, to see that it runs: its times mean nothing
    python -m benchmarks.tokens --part 3                           one part by itself

1. A PixArt-like transformer, 4,096 tokens: every way to split it.
2. A Wan-like one, which diffusers can split by itself: ours and diffusers' ways in the same run.
3. What hooks cost at one rank, where they have nothing to do.
4. Bytes per layer, by closed formula and counted.
5. A FLUX-like one, 512 tokens of text beside 1,024 of an image: text split between the ranks, or whole on both.

A call is one of the denoiser, batch 1. All ways take turns with the plain model; ratios are medians over the turns.
Exit code 1 if a part fails or a count is not what the formula says; the other parts are done and written all the same.
"""

import argparse
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.page import write_section
from benchmarks.timed_rank import ratio_of, slower
from benchmarks.tokens.ranks import WHOLE_TEXT
from patchpar.launch.local import LocalExecutor

WAYS = (
    "exact",
    "exact:attention=ring",
    "exact:attention=token-ring",
    "exact:ulysses=2",
    "displaced",
    "pcpp",
    "fresh-edges",
    "fresh-edges:context=pooled",
)
BESIDE = ("exact", "exact:ulysses=2", "exact:attention=ring", "displaced", "diffusers ulysses", "diffusers ring")
TEXT = ("exact", f"exact{WHOLE_TEXT}")
TARGETS = {"exact": 1.75, "displaced": 1.85}
MOST_OVERHEAD = 0.02
SECONDS = {"ways": 140.0, "beside": 80.0, "overhead": 45.0, "text": 45.0}  # of rounds, after the first calls
DEADLINE = 300.0
OPENING = "# Transformers with their tokens split\n"
Lines = Iterator[str]


class Missed(Exception):
    """A figure that does not depend on the machine is not what it must be."""


def ways(ranks: LocalExecutor, quick: bool) -> Lines:
    """Part 1: the table of all ways to split the PixArt-like model."""
    found = measured(ranks, "pixart", WAYS, "ways", quick)
    yield from head("PixArt-like", found)
    for case in WAYS:
        yield row(case, found["cases"][case], TARGETS.get(case))


def beside(ranks: LocalExecutor, quick: bool) -> Lines:
    """Part 2: the table of ours and diffusers' ways."""
    found = measured(ranks, "wan", BESIDE, "beside", quick)
    cases = found["cases"]
    yield from head("Wan-like", found)
    for case in BESIDE:
        yield row(case, cases[case], None)
    yield ""
    yield (
        "PixArt's attention processors cannot be split by diffusers (they do not go through its dispatcher), so the "
        "model beside is Wan-like: self-attention, attention to text, feed-forward, as PixArt. Diffusers' "
        "`enable_parallelism` asks for an accelerator; its mesh (over gloo) and hooks were set up by hand for CPUs, "
        "with the model's own plan."
    )
    if found["ring"]:
        yield (
            f"Its ring refuses on CPUs (*{found['ring']}*). It was lent the kernel of torch that can, "
            "`_scaled_dot_product_flash_attention_for_cpu`."
        )
    theirs = {case: each for case, each in cases.items() if case.startswith("diffusers") and each["pair"]}
    for case, each in theirs.items():
        times = [f"{name} {ratio_of(each['pair'], cases[name]['pair']):.3f}" for name in BESIDE if name not in theirs]
        yield ""
        yield f"Times as fast as {case}, medians over the turns: {', '.join(times)}."


def overhead(ranks: LocalExecutor, quick: bool) -> Lines:
    """Part 3: hooks on one rank."""
    found = ranks.call("overhead", "pixart", seconds_of("overhead", quick), quick, expected=600.0)[0]
    for size, tokens in zip(("many", "few"), found["tokens"], strict=True):
        each = found[size]
        plain, hooked = (statistics.median(each[name]) for name in ("plain", "hooked"))
        more = statistics.median(b - a for a, b in zip(each["plain"], each["hooked"], strict=True))
        ratio = 1 / ratio_of(each["plain"], each["hooked"]) - 1
        target = f" (limit {MOST_OVERHEAD:.0%})" if size == "many" else ""
        same = "the same to the bit" if each["same"] else "**not the same**"
        yield (
            f"- {tokens:,} tokens: plain {1e3 * plain:.1f} ms, hooked {1e3 * hooked:.1f} ms, {ratio:+.2%}{target}, "
            f"{1e3 * more:+.2f} ms per call; medians of {len(each['plain'])} in turns; predictions {same}."
        )
    yield ""
    yield (
        f"The PixArt-like model, {found['blocks']} blocks, all hooked, on an axis of one rank. A plan for one device "
        "installs no hooks at all: this is what interception itself costs."
    )
    if not all(found[size]["same"] for size in ("many", "few")):
        raise Missed("hooks at one rank change the prediction")


def volumes(ranks: LocalExecutor, quick: bool) -> Lines:
    """Part 4: bytes."""
    from benchmarks.tokens import volumes as tokens_volumes

    yield (
        f"What each rank sends per layer, in units of S tokens x hidden width, and counted with a toy of "
        f"{(tokens_volumes.LATENTS // 2) ** 2} tokens in fp32. The prediction, gathered once per call, is not counted."
    )
    yield ""
    yield from titles("ranks", "way", "formula", "bytes", "counted", "equal")
    missed = 0
    for line, equal in tokens_volumes.volumes():
        yield line
        missed += not equal
    if missed:
        raise Missed(f"{missed} counts differ from the formula")


def split_text(ranks: LocalExecutor, quick: bool) -> Lines:
    """Part 5: text split between the ranks, beside text on every rank."""
    found = measured(ranks, "flux", TEXT, "text", quick)
    yield from head("FLUX-like, 512 tokens of text", found)
    for case in TEXT:
        yield row(case, found["cases"][case], None)
    split, whole = (found["cases"][case]["pair"] for case in TEXT)
    yield ""
    yield f"Times as fast with split text, median over the turns: {ratio_of(whole, split):.3f}."


PARTS: dict[str, Callable[[LocalExecutor, bool], Lines]] = {
    "Two ranks against one process": ways,
    "Beside diffusers' own context parallelism": beside,
    "Interception at one rank": overhead,
    "Bytes per layer": volumes,
    "Text of joint attention": split_text,
}


def measured(ranks: LocalExecutor, model: str, cases: tuple[str, ...], part: str, quick: bool) -> dict[str, Any]:
    """What rank 0 found, with times and waits of the slower rank for every call."""
    first, second = ranks.call("measure", model, cases, seconds_of(part, quick), quick, expected=600.0)
    both = {case: (each, second["cases"][case]) for case, each in first["cases"].items()}
    return {**first, "cases": {case: slower(each, ("pair", "waited")) for case, each in both.items()}}


def seconds_of(part: str, quick: bool) -> float:
    """How long rounds go on."""
    return 1.0 if quick else SECONDS[part]


def head(name: str, found: dict[str, Any]) -> Lines:
    """What the model is, and the titles of its table."""
    turns = max(len(each["pair"]) for each in found["cases"].values())
    size = f"{found['parameters'] / 1e6:.1f} M parameters, {found['tokens']:,} tokens"
    yield f"{name}, {size}, fp32, {turns} turns; seconds per denoiser call:"
    yield ""
    yield from titles("way", "1 process", "2 ranks", "ratio", "target", "MiB sent per call", "waited, ms", "error")


def titles(*names: str) -> Lines:
    """The head of a table."""
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)


def row(case: str, found: dict[str, Any], target: float | None) -> str:
    """One line of a table."""
    if "refused" in found:
        return f"| {case} | | | | | | | {found['refused']} |"
    single, pair, waited = (statistics.median(found[name]) for name in ("single", "pair", "waited"))
    ours = not case.startswith("diffusers")  # what theirs send we do not see
    cells = [case, f"{single:.3f}", f"{pair:.3f}", f"{ratio_of(found['single'], found['pair']):.3f}", target or ""]
    cells += [f"{found['bytes'] / 2**20:.2f}", f"{1e3 * waited:.1f}"] if ours else ["", ""]
    cells.append(f"{found['error']:.1e}")
    return f"| {' | '.join(map(str, cells))} |"


def done(title: str, part: Callable[[LocalExecutor, bool], Lines], quick: bool) -> tuple[list[str], bool]:
    """The lines of a part, printed as they come, and whether all went well. Ranks of its own: a failure stays here."""
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    print(f"\n## {title}\n")
    try:
        with (
            TemporaryDirectory() as folder,
            LocalExecutor(
                ["cpu", "cpu"],
                "benchmarks.tokens.ranks:Bench",
                deadline=DEADLINE,
                preload=("patchpar.pipeline.runner",),
            ) as ranks,
        ):
            ranks.call("form_group", str(Path(folder) / "store"))
            for line in part(ranks, quick):
                say(line)
    except Exception as error:  # noqa: BLE001 - the other parts are to be done
        traceback.print_exc()
        say("")
        say(f"**Failed**: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return lines, False
    return lines, True


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toys, a few seconds")
    numbers = range(1, len(PARTS) + 1)
    parser.add_argument("--part", type=int, choices=numbers, action="append", help="this part only; may be repeated")
    parser.add_argument("--write", type=Path, help="also write each part to this file, which keeps its others")
    options = parser.parse_args()
    well = True
    for number, (title, part) in enumerate(PARTS.items(), 1):
        if options.part and number not in options.part:
            continue
        lines, fine = done(title, part, options.quick)
        well &= fine
        if options.write:
            write_section(OPENING, title, "\n".join(lines), options.write)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
