"""Figures that the README and the pages quote are those that the benchmarks wrote into docs/figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.forecast.published_plans import BY_PYTHON
from benchmarks.page import contents
from patchpar.plan.replay.machine import PUBLISHED_OFF, PUBLISHED_OFF_OF_SEVERAL

REPOSITORY = Path(__file__).parent.parent
FIGURES = REPOSITORY / "docs" / "figures"
SEVERAL = "Published times of several devices"
CAPTIONED = {
    "`displaced:preset=paper`, DistriFusion as published": "displaced:preset=paper,warmup_steps=1",
    "the same with the paper's five exact steps": "displaced:preset=paper",
    "`displaced`, the same method in fewer bytes": "displaced:warmup_steps=1",
    "`pcpp`": "pcpp:warmup_steps=1",
}
"""Rows of the README whose method is another than what stands between the first backticks."""
SETTINGS = {
    "4 ranks, 20 steps": ("256 x 256 pixels, 20 steps, DDIM", 4),
    "8 ranks, 20 steps": ("256 x 256 pixels, 20 steps, DDIM", 8),
    "4 ranks, 8 steps": ("256 x 256 pixels, 8 steps, DDIM", 4),
    "8 ranks, 8 steps": ("256 x 256 pixels, 8 steps, DDIM", 8),
    "DPM++ 2M, 4 ranks, 20 steps": ("256 x 256 pixels, 20 steps, DPM++ 2M", 4),
    "512 x 512, 4 ranks, 20 steps": ("512 x 512 pixels, 20 steps, DDIM", 4),
}
NORMS = {
    "`separate`": ("displaced:warmup_steps=1,group_norm=separate", "displaced:group_norm=separate"),
    "`stale`": ("displaced:warmup_steps=1,group_norm=stale", "displaced:group_norm=stale"),
    "`corrected`": ("displaced:warmup_steps=1", "displaced"),
    "`corrected`, `preset=paper`": ("displaced:preset=paper,warmup_steps=1", "displaced:preset=paper"),
    "`guarded`": ("displaced:warmup_steps=1,group_norm=guarded", "displaced:group_norm=guarded"),
    "`sync`": ("displaced:warmup_steps=1,group_norm=sync", "displaced:group_norm=sync"),
}
"""Group norms as a page calls them, and their methods with one exact step and with five."""
PUBLISHED = "displaced:preset=paper,warmup_steps=1"
MODELS = {"SDXL-type UNet": "large", "embedded model": "embedded"}
EARLIER = "†"
"""Marks figures of the embedded model as it was before it was trained further."""
Row = dict[str, str]


def section(text: str, heading: str) -> str:
    """From a heading of second order to the next; the whole text for none."""
    if not heading:
        return text
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading!r}"
    return found[1]


def rows(text: str, heading: str = "") -> list[Row]:
    """Rows of the first table there, by the names of its columns."""
    lines = [line for line in section(text, heading).splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    width = len(table[0])
    return [dict(zip(table[0], cells, strict=True)) for cells in table[2:] if len(cells) == width]


def written(name: str, heading: str = "") -> list[Row]:
    """Rows of the first table there, of what a benchmark wrote; of several models the table with the most of them."""
    sections = json.loads((FIGURES / f"{name}.json").read_text())
    found: list[list[Row]] = [
        each["tables"][0] for each in sections if heading in ("", each["heading"]) and each["tables"]
    ]
    return max(found, key=len) if heading else found[0]


def by_method(heading: str) -> dict[tuple[str, str], Row]:
    """Rows of the embedded UNet in one setting by method and ranks: with the weights as they are, where measured.

    PSNR of a row with earlier weights ends in EARLIER, also in the tables that quote it.
    """
    sections = json.loads((FIGURES / "quality.json").read_text())
    now = re.findall(r"its weights are those of `(\w+)`", "\n".join(sections[0]["text"]))[0]
    found: dict[tuple[str, str], Row] = {}
    alike = [each for each in sections[1:] if each["heading"] == heading]
    for each in sorted(alike, key=lambda each: now in "".join(each["text"])):
        mark = "" if now in "".join(each["text"]) else EARLIER
        for row in each["tables"][0]:
            found[row["method"].split(" (")[0], row["ranks"]] = {**row, "PSNR": f"{row['PSNR, dB']}{mark}"}
    return found


def message(name: str) -> str:
    """What a benchmark wrote in sentences."""
    return "\n".join(line for each in json.loads((FIGURES / f"{name}.json").read_text()) for line in each["text"])


def speeds(readme: str) -> Iterator[tuple[str, str, str]]:
    """What is quoted, as it stands there and as it should: how fast."""
    scaling = {(row["model"], row["plan"]): row["ratio"] for row in written("scaling")}
    tokens = {row["way"]: row["ratio"] for row in written("tokens", "Two ranks against one process")}
    for row in rows(readme, "Speed"):
        label = row.pop("model")
        model = next((model for words, model in MODELS.items() if label.startswith(words)), None)
        for column, cell in row.items():
            name = column.strip("`")
            if cell and model:
                plan = name if name in ("cfg=2", "patch=2") else f"patch=2, {name}"
                yield f"{label}, {name}", cell, f"{float(scaling[model, plan]):.2f}x"
            elif cell:
                yield f"{label}, {name}", cell, f"{float(tokens['exact' if name == 'patch=2' else name]):.2f}x"


def qualities(readme: str) -> Iterator[tuple[str, str, str]]:
    """The same: how close, and how much is sent."""
    for row in rows(readme, "Quality"):
        label = row.pop("strategy").replace("**", "")
        method = CAPTIONED.get(label) or (label.split("`")[1] if "`" in label else "naive")
        for column, cell in row.items():
            setting, ranks = SETTINGS.get(column, SETTINGS["4 ranks, 20 steps"])
            found = by_method(setting).get((method, str(ranks)))
            if cell:
                assert found, f"{method} has not been measured with {ranks} ranks, {setting}"
                sent = float(found["stale"] or found["sent, MB"])
                should = found["PSNR"] if column in SETTINGS else f"{sent:.1f} MB"
                yield f"{label}, {column}", cell.replace("**", ""), should


def started(table: Sequence[Row]) -> str:
    """What should be said of the time to the first step."""
    (row,) = (row for row in table if row[""] == "first step, s")
    return f"Start-up takes {float(row['ratio']):.2f}x as long"


def measured(setting: str, method: str, ranks: int) -> Row | None:
    """The row of this method on so many ranks, of the embedded UNet; None if it has not been measured."""
    known = {(row["method"].split(" (")[0], row["ranks"]): row for row in written("quality", setting)}
    return known.get((method, str(ranks)))


def norms() -> Iterator[str]:
    """Rows of the group norms: LPIPS, SSIM and PSNR after one exact step of 20, five of 20, five of 50."""
    for label, (one, five) in NORMS.items():
        cells = []
        for steps, method in ((20, one), (20, five), (50, five)):
            row = measured(f"256 x 256 pixels, {steps} steps, DDIM", method, 4)
            is_whole = row is not None and row["captions"] == "32"
            cells += [row["LPIPS"], row["SSIM"], row["PSNR, dB"]] if row is not None and is_whole else [""] * 3
        yield f"| {label} | {' | '.join(cells)} |"


def margins() -> Iterator[str]:
    """Rows of what fresh edges have over DistriFusion as published, with one exact step, in every setting of both."""
    for heading in dict.fromkeys(each["heading"] for each in json.loads((FIGURES / "quality.json").read_text())[1:]):
        found = {(row["method"].split(" (")[0], row["ranks"]): row for row in written("quality", heading)}
        for (_, ranks), paper in [(key, row) for key, row in found.items() if key[0] == PUBLISHED]:
            fresh = [found.get((name, ranks)) for name in ("fresh-edges", "fresh-edges:correction=linear")]
            above = [f"+{float(row['PSNR, dB']) - float(paper['PSNR, dB']):.1f}" if row else "" for row in fresh]
            yield f"| {' | '.join((heading, ranks, paper['captions'], paper['PSNR, dB'], *above))} |"


def margin(*sizes: str) -> str:
    """The least and the most that `fresh-edges` has over DistriFusion at these sizes, dB."""
    cells = [row.split("|")[5].strip() for row in margins() if row.split("|")[1].strip().startswith(sizes)]
    found = sorted(float(cell) for cell in cells if cell)
    return f"{found[0]:.1f} to {found[-1]:.1f}"


def sentences() -> Iterator[tuple[str, str]]:
    """Page, and what it should say."""
    beside = dict(
        re.findall(r"Times as fast as diffusers (\w+), medians over the turns: exact ([\d.]+)", message("tokens"))
    )
    yield (
        "docs/strategies.md",
        f"{float(beside['ulysses']):.2f}x as fast as its Ulysses, {float(beside['ring']):.2f}x as its ring",
    )
    yield "docs/strategies.md", started(written("startup"))
    table = (REPOSITORY / "docs" / "coverage.md").read_text().partition("## ")[0]
    classes = {row[""]: int(row["classes"]) for row in rows(table)}
    exact = sum(count for what, count in classes.items() if "exact" in what)
    tried = sum(count for what, count in classes.items() if what != "left out")
    yield "README.md", f"the {tried} transformer and UNet classes of diffusers"
    yield "README.md", f"could be made of, {exact} are split exactly"
    yield "CHANGELOG.md", f"{exact} of {tried} classes are split exactly"
    yield "README.md", f"on two to eight GPUs: {near_published_times()} within 20 %"
    parity = written("parity")
    plans = [name for name in parity[0] if name.startswith(("patch", "cfg"))]
    error = max(float(row[plan]) for row in parity for plan in plans)
    decibels = min(int(row["least PSNR"].removesuffix(" dB")) for row in parity)
    alone = [float(row["alone"]) for row in parity]
    worst = f"{error:.1e}".replace("e-0", "e-")
    yield "docs/accuracy.md", f"at most {worst} off, at least {decibels} dB"
    yield "docs/exact-patch.md", f"at most {worst} ({decibels} dB or more)"
    yield "docs/exact-patch.md", f"without the exchange {min(alone):.2g} to {max(alone):.2g}"
    yield "README.md", f"differs by rounding only ([at least {decibels} dB]"
    yield "docs/comparison.md", f"{margin('256 x 256', '512 x 512')} dB](decisions/"
    yield "docs/comparison.md", f"by {margin('512 x 768')} dB at 512 x 768"
    for words in norms():
        yield "docs/stale-patch.md", words
    for words in margins():
        yield "docs/decisions/0017-owners-send-corrections-of-stale-keys.md", words
    for row in written("quality-dit", "256 x 256 pixels, 20 steps, flow"):
        if row["stale"] and "frozen" not in row["method"]:
            method = re.sub(r"[:,]warmup_steps=1", "", row["method"].split(" (")[0])
            page = "docs/stages.md" if method.startswith("piped") else "docs/tokens.md"
            yield page, f"`{method}`"
            yield page, f"| {float(row['PSNR, dB']):.1f} dB | {float(row['stale']):.1f} MB |"


def outdated(readme: str) -> list[str]:
    quoted = [*speeds(readme), *qualities(readme)]
    return [f"{what}: {cell}, measured is {should}" for what, cell, should in quoted if cell != should]


README = (REPOSITORY / "README.md").read_text()
STRATEGIES = (REPOSITORY / "docs" / "strategies.md").read_text()


@pytest.mark.parametrize(("page", "least"), [(README, (10, 10)), (STRATEGIES, (15, 25))], ids=["README", "strategies"])
def test_tables_of_speed_and_quality(page: str, least: tuple[int, int]) -> None:
    assert outdated(page) == []
    assert (len([*speeds(page)]), len([*qualities(page)])) >= least


@pytest.mark.parametrize("quoted", [speeds, qualities])
@pytest.mark.parametrize("page", [README, STRATEGIES], ids=["README", "strategies"])
def test_an_outdated_figure_would_be_seen(page: str, quoted: Callable[[str], Iterator[tuple[str, str, str]]]) -> None:
    cell = next(quoted(page))[1]
    assert outdated(page.replace(cell, re.sub(r"\d", "9", cell)))


def test_corrected_pieces_are_ahead_of_those_as_published() -> None:
    """PipeFusion with our corrections of keys and values, against none, in pieces that send as much and in any."""
    table = written("quality-dit", "256 x 256 pixels, 20 steps, flow")
    found = {row["method"].split(" (")[0]: row for row in table if row["method"].startswith("piped")}
    decibels = {method: float(row["PSNR, dB"]) for method, row in found.items()}
    plain, with_text = "piped:correction=none", "piped:correction=none,text=each"
    assert all(int(found[method]["captions"]) >= 32 for method in ("piped", plain, with_text))
    assert decibels["piped"] >= 47
    assert decibels["piped"] - max(decibels[plain], decibels[with_text]) >= 8
    assert float(found["piped"]["stale"]) <= min(float(found[method]["stale"]) for method in (plain, with_text))


def near_published_times() -> str:
    """How many of the times of several devices that do not wait for Python."""
    table = [row for row in written("forecast", SEVERAL) if BY_PYTHON not in row["published are"]]
    return f"{sum(abs(int(row['error'].rstrip('%'))) <= 20 for row in table)} of {len(table)}"


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 9 * 1024


@pytest.mark.parametrize(("page", "words"), [*sentences()], ids=lambda value: value[:40])
def test_sentences(page: str, words: str) -> None:
    assert words in (REPOSITORY / page).read_text()


@pytest.mark.parametrize(
    ("section", "want"),
    [
        ("Published times of one device", PUBLISHED_OFF),
        (SEVERAL, PUBLISHED_OFF_OF_SEVERAL),
    ],
)
def test_the_range_of_predictions_is_that_of_the_published_rows(section: str, want: tuple[float, float]) -> None:
    found = [
        float(row["predicted s"]) / float(row["published s"]) - 1
        for row in written("forecast", section)
        if BY_PYTHON not in row["published are"]
    ]
    assert (min(found), max(found)) == pytest.approx(want, abs=0.01)


@pytest.mark.parametrize("page", sorted(FIGURES.glob("*.md")), ids=lambda page: page.stem)
def test_pages_and_what_programs_read_are_the_same(page: Path) -> None:
    assert json.loads(page.with_suffix(".json").read_text()) == contents(page.read_text())


def test_which_plan_fits_which_card() -> None:
    """The table of the page on larger models is a part of what was computed."""
    page = (REPOSITORY / "docs" / "howto" / "larger-models.md").read_text()
    table = rows(page, "Which plan fits which card")
    assert len(table) == 6
    for row in table:
        of_model = {each["cards"]: each for each in written("fits", row["model"])}
        for cell in [name for name in row if name != "model"]:
            count, _, card = cell.partition(" x ")
            assert row[cell] == of_model[count][card]


def test_how_often_the_predicted_plan_is_the_right_one() -> None:
    """From the text of the measured page, and from its rows: by the loss of each setting and the plan chosen there."""
    settings = written("ranking", "")
    right = sum(float(row["loss"].rstrip("%")) <= 5 for row in settings)
    of_two = sum(row["chosen"] == "`cfg=2`" for row in settings)
    others = re.search(
        r"Among the other plans alone the choice is right in (\d+)", (FIGURES / "ranking.md").read_text()
    )
    assert others
    sentence = (
        f"in {right} of {len(settings)} settings, in {of_two} of which it was `cfg=2`; "
        f"among the other five plans in {others[1]} of {len(settings)} ("
    )
    assert sentence in (REPOSITORY / "docs" / "simulator.md").read_text()


def test_how_long_replayed_steps_take() -> None:
    found = [float(row["off"].rstrip("%")) for row in written("delayed-links", "")]
    sentence = f"in {sum(abs(off) <= 5 for off in found)} of {len(found)} cases, of 8 strategies over 12 links ("
    assert sentence in (REPOSITORY / "docs" / "simulator.md").read_text()
