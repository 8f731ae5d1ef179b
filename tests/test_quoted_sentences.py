"""Numbers in sentences of hand-written pages are those that the benchmarks wrote: a table of which is which."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
NUMBER = r"(\d+(?:\.\d+)?)"
UNETS, TRANSFORMERS = ("sd", "sdxl"), ("flux", "sd3")
Row = dict[str, str]
Read = Callable[[str], list[Row]]
"""Returns the rows of a file of docs/figures; each has its section as "heading", and the number of its "table"."""


def written(name: str) -> list[Row]:
    """What a benchmark wrote."""
    sections = json.loads((REPOSITORY / "docs" / "figures" / f"{name}.json").read_text())
    tables = [(each["heading"], table) for each in sections for table in each["tables"]]
    return [row | {"heading": heading, "table": str(at)} for at, (heading, table) in enumerate(tables) for row in table]


@dataclass(frozen=True, slots=True)
class Figures:
    """One or several numbers: of `column`, in the rows of `name` whose columns match `where`, as regular expressions.

    `scale` is a factor, such as 100 for per cent, `digits` those behind the point. `pick` makes numbers of those found.
    """

    name: str
    column: str
    where: dict[str, str]
    scale: float = 1
    digits: int = 1
    pick: Callable[[Iterable[float]], float | Sequence[float]] = lambda found: list(found)

    def printed(self, read: Read) -> list[str]:
        """As a page should show them."""
        rows = [row for row in read(self.name) if all(re.fullmatch(x, row.get(c, "")) for c, x in self.where.items())]
        values = [value for row in rows if (value := number_in(row[self.column])) is not None]
        assert values, f"{self.name}: no row has {self.where}"
        picked = self.pick(values)
        return [
            f"{self.scale * each:.{self.digits}f}" for each in (picked if isinstance(picked, Sequence) else [picked])
        ]


def number_in(cell: str) -> float | None:
    """The last number of a cell, which stands in brackets if there are two; None for words."""
    found = re.findall(r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?", cell)
    return float(found[-1]) if found else None


def any_of(names: Iterable[str]) -> str:
    return "|".join(names)


def least_and_most(found: Iterable[float]) -> Sequence[float]:
    values = list(found)
    return min(values), max(values)


def half(pipelines: Iterable[str], dtype: str, column: str, digits: int = 1) -> Figures:
    """Per cent, the least and the most of some pipelines."""
    where = {"pipeline": any_of(pipelines), "format": dtype}
    return Figures("parity-half", column, where, 100, digits, least_and_most)


def quality(method: str, column: str) -> Figures:
    where = {"heading": "256 x 256 pixels, 20 steps, DDIM", "method": re.escape(method), "ranks": "4", "captions": "32"}
    return Figures("quality", column, where, pick=lambda found: next(iter(found)))  # of the model's earlier weights


def hidden(name: str, strategies: str, pick: Callable[[Iterable[float]], float | Sequence[float]]) -> Figures:
    """Per cent of a link's time up to that of a step."""
    return Figures(name, "hidden", {"strategy": strategies, "of a step": r"0\.\d+"}, 1, 0, pick)


def visible(found: Iterable[float]) -> Sequence[float]:
    least, most = least_and_most(found)
    return 100 - most, 100 - least


def computing(model: str, step: str = "graph") -> list[Figures]:
    """Milliseconds on a GPU, as a graph or eager: of one rank of four, and of one process."""
    rows = (("`exact`", f"exact, {step}"), ("plain", step))
    return [Figures("gpu", "ms", {"model": model, "strategy": x, "step": y}, 1, 0) for x, y in rows]


def exchange(ratios: Iterable[float]) -> Sequence[float]:
    """What an exchange of keys costs two ranks, in units of a branch on one device, by how much faster they are."""
    return sorted(2 / ratio - 1 for ratio in ratios)


def mixed(load: str, policy: str, column: str) -> Figures:
    """Of the simulated mix of requests."""
    return Figures("serving", column, {"load": re.escape(load), "policy": policy}, 1, 0)


OFF, ONE_STEP, RANKS_OFF = "ranks beside one process", "one step: ranks off", "ranks off"
POOLED = "fresh-edges:context=pooled,bits=4"
WORST = [
    quality(f"displaced{options}", column)
    for options in (
        ":preset=paper,warmup_steps=1 (DistriFusion)",
        ":preset=paper (DistriFusion)",
        ":warmup_steps=1",
        "",
    )
    for column in ("PSNR, dB", "worst")
]
QUOTED: list[tuple[str, str, list[Figures]]] = [
    (
        "../README",
        f"a step of SDXL at 1024 x 1024 takes {NUMBER} ms against {NUMBER} ms of one process, of FLUX {NUMBER} against "
        f"{NUMBER}",
        [*computing("sdxl"), *computing("flux")],
    ),
    (
        "faq",
        rf"takes {NUMBER} ms of {NUMBER} \(SDXL\) and {NUMBER} of {NUMBER} \(FLUX\)",
        [*computing("sdxl"), *computing("flux")],
    ),
    (
        "decisions/0017-owners-send-corrections-of-stale-keys",
        f"extrapolate, {NUMBER} instead of {NUMBER} ",
        [
            Figures("emulation", "images, dB", {"heading": "32 captions, 256.*", "policy": f"fresh edges{policy}"})
            for policy in (", all keys, affine, by owners", ", all keys, affine")
        ],
    ),
    (
        "automatic-plan",
        f"{NUMBER} and {NUMBER} between workers of one host",
        [Figures("scaling", "ratio", {"model": "embedded|large", "plan": "patch=2"}, 1, 2, exchange)],
    ),
    (
        "accuracy",
        f"UNets by {NUMBER} to {NUMBER} % in fp16 and by {NUMBER} to {NUMBER} % in bf16, "
        f"transformers by {NUMBER} to {NUMBER} % and by {NUMBER} to {NUMBER} %",
        [
            half(UNETS, "float16", OFF),
            half(UNETS, "bfloat16", OFF, 0),
            half(TRANSFORMERS, "float16", OFF),
            half(TRANSFORMERS, "bfloat16", OFF),
        ],
    ),
    (
        "accuracy",
        f"is {NUMBER} % from fp32 with the UNets of that table, {NUMBER} % with SD3 and {NUMBER} % with FLUX",
        [Figures("rounding", f"{name}, rounded", {"in fp32": "nothing"}, 100) for name in ("sd", "sd3", "flux")],
    ),
    (
        "accuracy",
        f"UNets are {NUMBER} to {NUMBER} % off after a single step without guidance, and {NUMBER} to {NUMBER} % after",
        [half(UNETS, "bfloat16", ONE_STEP), half(UNETS, "bfloat16", RANKS_OFF)],
    ),
    (
        "accuracy",
        f"those of SD3 {NUMBER} and {NUMBER} %, of FLUX {NUMBER} and {NUMBER} %",
        [
            Figures("parity-half", column, {"pipeline": name, "format": "bfloat16"}, 100)
            for name in ("sd3", "flux")
            for column in (ONE_STEP, RANKS_OFF)
        ],
    ),
    (
        "accuracy",
        f"{NUMBER} to {NUMBER} % farther from fp32 than by one kernel for all keys, and {NUMBER} to {NUMBER} % with",
        [
            Figures("merged-attention", column, {}, 1, 0, least_and_most)
            for column in ("farther off, %", "its parts, %")
        ],
    ),
    (
        "stale-patch",
        f"receives {NUMBER} % of what DistriFusion's does \\(SDXL, 1024 x 1024\\)",
        [Figures("volumes", "of DistriFusion's", {"image": "1024²", "strategy": re.escape(POOLED)})],
    ),
    (
        "stale-patch",
        f"it is {NUMBER} % at 512 x 512 on eight ranks, and {NUMBER} % at 256 x 256 on four",
        [
            Figures("volumes", column, {"strategy": re.escape(POOLED), column: ".+"})
            for column in ("512², 8 ranks", "256², 4 ranks")
        ],
    ),
    (
        "stale-patch",
        f"hide {NUMBER} % and more of the link time",
        [hidden("overlap", "displaced|pcpp", min)],
    ),
    ("stale-patch", f"with `exact` {NUMBER} to {NUMBER} % of it remains", [hidden("overlap", "exact", visible)]),
    (
        "stale-patch",
        f"{NUMBER} rounds of 20 ms",
        [Figures("overlap", "link time, s", {"strategy": "fresh-edges", "link": "20 ms, no limit"}, 50, 0)],
    ),
    (
        "stale-patch",
        f"is within {NUMBER} % of every measured step",
        [Figures("overlap", "off", {"off": ".+"}, 1, 0, lambda found: math.ceil(max(map(abs, found))))],
    ),
    (
        "stale-patch",
        f"32 captions it has {NUMBER} dB with a worst of {NUMBER} after one exact step of 20, and {NUMBER} with a "
        rf"worst of {NUMBER} after the paper's five, against {NUMBER} \({NUMBER}\) and {NUMBER} \({NUMBER}\) of",
        WORST,
    ),
    (
        "parallel-vae",
        f"at least {NUMBER} dB on 2, 3 and 4 ranks with uneven bands, ten classes; every band alone at most {NUMBER} ",
        [Figures("vae", name, {name: ".+"}, 1, 0, pick) for name, pick in (("3 ranks", min), ("alone", max))],
    ),
    (
        "troubleshooting",
        f"{NUMBER} to {NUMBER} GB for SDXL at 1024 x 1024 on eight ranks",
        [Figures("volumes", "held", {"image": "1024²", "strategy": "displaced|fresh-edges"}, 1e-3)],
    ),
    (
        "howto/operate-a-server",
        rf"at 0\.6 of what they can do one by one, `deadline` meets {NUMBER}% of the deadlines, all with suspension, "
        rf"and `latency`, which takes fewer requests than come there, {NUMBER}%; at 0\.3, {NUMBER}%, all and {NUMBER}%"
        rf"\. `throughput` ends {NUMBER} requests per minute at 0\.9, and `latency` {NUMBER}\.",
        [
            *(mixed(load, policy, "deadlines met") for load in ("0.6", "0.3") for policy in ("deadline", "latency")),
            *(mixed("0.9", policy, "requests per minute") for policy in ("throughput", "latency")),
        ],
    ),
    (
        "tokens",
        rf"\| no exchange at all \| {NUMBER} dB",
        [Figures("quality-dit", "PSNR, dB", {"heading": "256 x 256 pixels, 20 steps, flow", "method": "naive.*"})],
    ),
    (
        "tokens",
        rf"is {NUMBER} times as fast as one process with its text split, and {NUMBER} times with all of it on both",
        [Figures("tokens", "ratio", {"heading": "Text of joint attention"}, digits=2)],
    ),
]


def outdated(text: str, words: str, figures: Iterable[Figures], read: Read = written) -> str:
    """What a text says beside what it should, where it does not."""
    found = re.search(words, text)
    if found is None:
        return f"nothing matches {words!r}"
    wanted = [printed for each in figures for printed in each.printed(read)]
    return "" if [*found.groups()] == wanted else f"{found[0]}: {', '.join(wanted)} was measured"


def text_of(page: str) -> str:
    return (REPOSITORY / "docs" / f"{page}.md").read_text()


cases = pytest.mark.parametrize(
    ("page", "words", "figures"), QUOTED, ids=[f"{page}-{words}"[:40] for page, words, _ in QUOTED]
)


@cases
def test_they_are_those_that_were_measured(page: str, words: str, figures: list[Figures]) -> None:
    assert not outdated(text_of(page), words, figures)


@cases
def test_a_page_that_was_not_rewritten_after_a_measurement_fails(page: str, words: str, figures: list[Figures]) -> None:
    """Negative control: each number is changed, first in the page and then in what was measured."""
    text = text_of(page)
    found = re.search(words, text)
    assert found
    for at in range(1, len(found.groups()) + 1):
        start, end = found.span(at)
        assert outdated(f"{text[:start]}77.7{text[end:]}", words, figures), at

    def measured_again(name: str) -> list[Row]:
        return [{column: _changed(column, cell) for column, cell in row.items()} for row in written(name)]

    assert outdated(text, words, figures, measured_again)


KEYS = ("heading", "table", "method", "ranks", "captions", "strategy", "link", "image", "of a step", "pipeline")
NAMES = ("policy", "model", "plan", "step")


def _changed(column: str, cell: str) -> str:
    value = None if column in (*KEYS, *NAMES, "format", "in fp32", "load") else number_in(cell)
    return cell if value is None else str(1.4 * value)


def test_another_batch_does_not_change_an_image_at_all() -> None:
    """Which the page on accuracy says of a CPU."""
    assert "does not differ at all on a CPU" in text_of("accuracy")
    assert {float(row["another batch"]) for row in written("parity-half")} == {0.0}
