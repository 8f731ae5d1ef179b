"""The quality benchmark without ranks: what is written down, what is not drawn twice, table, plot, figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from benchmarks.image_quality import MAX_DB
from benchmarks.quality import __main__ as quality
from benchmarks.quality import bench as quality_bench
from benchmarks.quality.bench import Bench, cost_of, versions_here
from benchmarks.quality.generation import Caption, Comparison, Meter, OneProcess, arguments, hash_of
from benchmarks.quality.known import rows_of_page, with_measured
from benchmarks.quality.plot import Box, _box, plot, write_plot
from benchmarks.quality.records import ONE_PROCESS, Method, Named, Record, Records, Setting
from benchmarks.quality.table import rows_of, table
from patchpar import Plan, Run
from patchpar.errors import PlanError, WorkerDied
from patchpar.models.files import embedded_model
from patchpar.pipeline.rank_stats import RankStats, StepStats
from training.classifier import load_classifier
from training.latents import to_tensor
from training.render import sample_render
from training.scenes import flipped, held_out_captions

SETTING = Setting(model="abc", height=256, width=384, steps=20, scheduler="DDIM", guidance=3.5, seed=1000)
EXACT, NAIVE, FROZEN = Named.parse("exact"), Named.parse("naive"), Named.parse("frozen:warmup_steps=2")
STALE, FRESH = Named.parse("displaced"), Named.parse("fresh-edges:context=pooled,pool=2")
PLAN = Plan(patch=2, strategy="displaced")


def rank_of(number: int, sent: Sequence[int], waited: float) -> RankStats:
    """Two exact steps and two stale ones; so many bytes in each."""
    steps = [
        StepStats(
            bytes_sent={"halo": 1, "keys": count - 1},
            bytes_received={},
            seconds_waited={},
            exact_calls=int(index < 2),
            stale_calls=int(index >= 2),
        )
        for index, count in enumerate(sent)
    ]
    return RankStats(
        rank=number,
        device="cpu",
        bytes_sent={"halo": len(sent), "keys": sum(sent) - len(sent)},
        bytes_received={},
        seconds_waited={"halo": waited / 4, "keys": 3 * waited / 4},
        steps=tuple(steps),
    )


RUN = Run(plan=PLAN, seconds=1.0, ranks=(rank_of(0, (10, 10, 4, 4), 1.0), rank_of(1, (40, 30, 20, 30), 0.5)))
CAPTIONS = [Caption(index=index, text=text, scene=scene) for index, (text, scene) in enumerate(held_out_captions(5))]


def record(named: Named = STALE, **changes: Any) -> Record:
    plain = Record(
        setting=SETTING,
        method=named.method,
        label=named.label,
        ranks=4,
        caption=0,
        psnr_db=30.0,
        ssim=0.95,
        lpips=0.05,
        right=True,
        bytes_per_step=2e6,
        stale_step_bytes=1.5e6,
        seconds_waited=0.012,
        exact_steps=5,
        batch=8,
        cores=8,
    )
    return replace(plain, **changes)


# --- methods ------------------------------------------------------------------------------------------------------


def test_a_method_is_known_by_all_its_options() -> None:
    assert Named.parse("displaced").method == Named.parse("displaced:warmup_steps=5").method
    assert Named.parse("displaced").method != Named.parse("displaced:warmup_steps=4").method
    assert Named.parse("displaced:warmup_steps=4").label == "displaced:warmup_steps=4"


def test_controls_are_no_methods() -> None:
    assert (NAIVE.text, NAIVE.method.exchange) == ("exact", "off")
    assert (FROZEN.text, FROZEN.method.exchange) == ("displaced:warmup_steps=2", "frozen")
    assert len({named.method for named in (EXACT, NAIVE, FROZEN, Named.parse("displaced:warmup_steps=2"))}) == 4


def test_defaults_exist() -> None:
    for defaults in (quality.FULL, quality.QUICK):
        methods = {Named.parse(label).method for label in defaults.strategy}
        assert len(methods) == len(defaults.strategy)
        assert {"off", "frozen"} <= {method.exchange for method in methods}
    assert quality.FULL.captions >= 32


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy", "displaced:warmup=3"], "does not know 'warmup=3'"),
        (["--strategy", "magic"], "unknown strategy 'magic'"),
        (["--size", "512"], "no height x width"),
        (["--captions", "0"], "at least 1"),
        (["--captions", "8", "--first", "8"], "--first 8 leaves nothing of 8 captions"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quality.parse(flags)
    assert message in capsys.readouterr().err


def test_flags_select() -> None:
    options = quality.with_defaults(quality.parse(["--quick", "--size", "512x768", "--steps", "8", "--steps", "10"]))
    settings = list(quality.settings_of(options, "abc"))
    assert [(each.height, each.width, each.steps) for each in settings] == [(512, 768, 8), (512, 768, 10)]
    assert options.captions == quality.QUICK.captions
    one = record(label="one process", method=ONE_PROCESS, ranks=1)
    older = record(setting=replace(SETTING, model="older"))
    known = rows_of([one, record(), record(ranks=8), record(FRESH), older])
    options = quality.parse(["--ranks", "4", "--strategy", "displaced", "--size", "256x384"])
    assert quality.selected(known, options, "abc") == known[:2]
    assert quality.selected(known, quality.parse([]), "abc") == known[:4]
    assert quality.selected(known, quality.parse(["--size", "256x256"]), "abc") == []


# --- the file -----------------------------------------------------------------------------------------------------


def test_records_come_back(tmp_path: Path) -> None:
    written = [record(), record(FRESH, lpips=None), record(FROZEN, caption=7)]
    Records(tmp_path / "new" / "file").add(written)
    assert Records(tmp_path / "new" / "file").all() == written


def test_the_newest_line_counts(tmp_path: Path) -> None:
    Records(tmp_path / "file").add([record(), record(caption=1)])
    Records(tmp_path / "file").add([record(psnr_db=31.0)])
    read = Records(tmp_path / "file")
    assert [each.psnr_db for each in read.all()] == [31.0, 30.0]
    assert read.find(record().key) == record(psnr_db=31.0)
    assert read.find(record(ranks=2).key) is None


def test_lines_that_are_older_than_their_versions_are_read(tmp_path: Path) -> None:
    """What is measured now names them; they decide nothing."""
    path = tmp_path / "file"
    Records(path).add([record(versions="torch 1")])
    path.write_text(path.read_text().replace(', "versions": "torch 1"', ""))
    assert "versions" not in path.read_text()
    assert Records(path).all() == [record()]
    assert Records(path).find(record(versions="torch 2").key) == record()
    found = versions_here()
    assert all(f"{package} {version(package)}" in found for package in ("torch", "diffusers", "patchpar"))


def test_half_a_line_of_a_run_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    Records(path).add([record(), record(caption=1)])
    path.write_bytes(path.read_bytes()[:-20])
    read = Records(path)
    assert read.all() == [record()]
    read.add([record(caption=2)])
    assert Records(path).all() == [record(), record(caption=2)]


@pytest.mark.parametrize("line", ["{", "[]", '{"setting": {}}', '{"method": 3}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    Records(tmp_path / "file").add([record()])
    with (tmp_path / "file").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*file is no record"):
        Records(tmp_path / "file")


# --- nothing is drawn twice ---------------------------------------------------------------------------------------


class FakeRanks:
    """Ranks that write down what they were asked. `fail`: what happens instead of the first draw of that method."""

    generated: list[tuple[int, str, list[int]]]
    fail: dict[str, BaseException]

    def __init__(self, model: Path, count: int) -> None:
        self.count, self.label = count, ""

    def __enter__(self) -> FakeRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextmanager
    def under(self, named: Named, setting: Setting, scheduler: object, caption: Caption) -> Iterator[None]:
        self.label = named.label
        yield

    def generate(self, setting: Setting, captions: Sequence[Caption]) -> tuple[Tensor, Any]:
        if self.label in self.fail:
            raise self.fail.pop(self.label)
        self.generated.append((self.count, self.label, [caption.index for caption in captions]))
        return torch.full((len(captions), 1), 0.5), RUN


class FakeProcess:
    def scheduler(self, name: str) -> object:
        return name

    def exact(self, setting: Setting, captions: Sequence[Caption]) -> Tensor:
        return torch.ones(len(captions), 1)

    def decode(self, latents: Tensor) -> Tensor:
        return latents


class FakeMeter:
    def __init__(self, lpips: float | None) -> None:
        self.lpips = lpips

    def compare(self, made: Tensor, exact: Tensor, captions: Sequence[Caption]) -> list[Comparison]:
        return [Comparison(psnr_db=30.0, ssim=0.9, lpips=self.lpips, right=True) for _ in captions]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> type[FakeRanks]:
    FakeRanks.generated, FakeRanks.fail = [], {}
    monkeypatch.setattr(quality_bench, "Ranks", FakeRanks)
    return FakeRanks


def measure(path: Path, *, captions: int = 5, methods: Sequence[Named] = (STALE,), **changes: Any) -> int:
    bench = Bench(
        model=Path("model"),
        one=FakeProcess(),  # type: ignore[arg-type]
        meter=FakeMeter(changes.pop("lpips", 0.1)),  # type: ignore[arg-type]
        records=Records(path),
        captions=CAPTIONS[:captions],
        batch=2,
        again=changes.pop("again", False),
    )
    return bench.measure([SETTING], methods, changes.pop("ranks", [4]))


def test_figures_are_of_one_image(tmp_path: Path, ranks: type[FakeRanks]) -> None:
    measure(tmp_path / "file", captions=2)
    one, _, stale, _ = Records(tmp_path / "file").all()
    assert (one.method, one.ranks, one.bytes_per_step) == (ONE_PROCESS, 1, 0.0)
    assert (stale.method, stale.ranks, stale.batch) == (STALE.method, 4, 2)
    assert (stale.bytes_per_step, stale.stale_step_bytes, stale.seconds_waited) == (15.0, 12.5, 0.25)
    assert (one.exact_steps, stale.exact_steps) == (20, 2)


def test_a_method_without_old_values_has_no_stale_steps() -> None:
    ranks = [replace(rank, steps=tuple(replace(step, stale_calls=0) for step in rank.steps)) for rank in RUN.ranks]
    found = cost_of(replace(RUN, ranks=tuple(ranks)), 1)
    assert (found.stale_step_bytes, found.exact_steps) == (None, 4)


def test_what_is_known_is_not_generated(tmp_path: Path, ranks: type[FakeRanks]) -> None:
    measure(tmp_path / "file", captions=3)
    assert ranks.generated == [(4, "displaced", [0, 1]), (4, "displaced", [2])]
    ranks.generated.clear()
    measure(tmp_path / "file", captions=3)
    assert ranks.generated == []
    measure(tmp_path / "file", captions=5, methods=[STALE, FRESH], ranks=[4, 2])
    assert ranks.generated[0] == (4, "displaced", [3, 4])
    assert [each for each in ranks.generated if each[:2] == (4, FRESH.label)] == [
        (4, FRESH.label, [0, 1]),
        (4, FRESH.label, [2, 3]),
        (4, FRESH.label, [4]),
    ]
    assert len(Records(tmp_path / "file")) == 5 + 4 * 5


def test_asked_again_it_is_generated_again(tmp_path: Path, ranks: type[FakeRanks]) -> None:
    measure(tmp_path / "file")
    measure(tmp_path / "file", again=True)
    assert len(ranks.generated) == 6
    assert len(Records(tmp_path / "file")) == 10


def test_lpips_can_come_later(tmp_path: Path, ranks: type[FakeRanks]) -> None:
    measure(tmp_path / "file", lpips=None)
    measure(tmp_path / "file", lpips=None)
    assert len(ranks.generated) == 3
    measure(tmp_path / "file", lpips=0.2)
    assert len(ranks.generated) == 6
    measure(tmp_path / "file", lpips=None)
    assert {each.lpips for each in Records(tmp_path / "file").all()} == {0.2}


def test_an_interrupted_run_goes_on(tmp_path: Path, ranks: type[FakeRanks]) -> None:
    ranks.fail[FRESH.label] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "file", captions=2, methods=[STALE, FRESH])
    measure(tmp_path / "file", captions=2, methods=[STALE, FRESH])
    assert ranks.generated == [(4, "displaced", [0, 1]), (4, FRESH.label, [0, 1])]


def test_a_cell_that_cannot_be_generated(tmp_path: Path, ranks: type[FakeRanks], capsys: Any) -> None:
    ranks.fail["displaced"] = WorkerDied("rank 3 is gone")
    assert measure(tmp_path / "file", captions=2, methods=[STALE, FRESH]) == 1
    assert "displaced: rank 3 is gone" in capsys.readouterr().err
    assert ranks.generated == [(4, FRESH.label, [0, 1])]


# --- table and plot -----------------------------------------------------------------------------------------------


def test_rows_are_means() -> None:
    (row,) = rows_of([record(), record(caption=1, psnr_db=20.0, right=False, lpips=0.15)])
    assert (row.captions, row.psnr_db, row.worst_db, row.right) == (2, 25.0, 20.0, 0.5)
    assert row.lpips == pytest.approx(0.1)
    (row,) = rows_of([record(), record(caption=1, lpips=None)])
    assert row.lpips is None


def test_the_table() -> None:
    other = replace(SETTING, steps=8)
    found = table_of(
        [
            record(NAIVE, psnr_db=11.0, lpips=None, stale_step_bytes=None, exact_steps=20),
            record(FRESH, psnr_db=45.0, ranks=4, cores=2),
            record(setting=other, caption=3),
            record(
                label="one process",
                method=ONE_PROCESS,
                ranks=1,
                psnr_db=MAX_DB,
                bytes_per_step=0.0,
                stale_step_bytes=None,
                exact_steps=20,
            ),
        ]
    )
    first, second = (found.index(f"256 x 384 pixels, {steps} steps, DDIM") for steps in (8, 20))
    assert first < second
    one, fresh, naive = (line.split(" | ") for line in found[second:].splitlines()[6:])
    assert one == ["| one process", "1", "1", "", "", "", "", "100 %", "20", "", "", " |"]
    assert fresh[:3] == ["| fresh-edges:context=pooled,pool=2", "4", "1"]
    assert fresh[3:] == ["45.0", "45.0", "0.9500", "0.0500", "100 %", "5", "2.000", "1.500", "12* |"]
    assert naive[0] == "| naive (negative control: no exchange)"
    assert naive[3:] == ["11.0", "11.0", "0.9500", "not measured", "100 %", "0", "2.000", "", "12 |"]


def test_a_published_method_has_the_name_of_its_paper(tmp_path: Path) -> None:
    records = [record(Named.parse("displaced:preset=paper,warmup_steps=1")), record(STALE)]
    options = quality.parse(["--table", str(tmp_path / "it.md")])
    assert quality.write_documents(options, records, "abc") == 0
    page = (tmp_path / "it.md").read_text()
    assert "| displaced:preset=paper,warmup_steps=1 (DistriFusion) | 4 |" in page
    assert "| displaced | 4 |" in page
    assert {row.label for row in rows_of_page(tmp_path / "it.md")} == {each.label for each in records}
    assert {"DistriFusion", "displaced"} <= set(texts(plot(rows_of(records))))


def table_of(records: Sequence[Record]) -> str:
    return table(rows_of(records))


def test_what_a_table_has_stays_until_more_captions_are_measured(tmp_path: Path) -> None:
    one = record(label="one process", method=ONE_PROCESS, ranks=1, psnr_db=MAX_DB, bytes_per_step=0.0)
    before = [one, *(record(STALE, caption=number) for number in (0, 1)), record(NAIVE, lpips=None), record(FRESH)]
    options = quality.parse(["--table", str(tmp_path / "it.md")])
    assert quality.write_documents(options, before, "abc") == 0
    first = (tmp_path / "it.md").read_text()
    assert quality.write_documents(options, [], "abc") == 0
    assert (tmp_path / "it.md").read_text() == first
    fewer, as_many = record(STALE, psnr_db=1.0), record(FRESH, psnr_db=2.0)
    assert quality.write_documents(options, [fewer, as_many], "abc") == 0
    assert {row.label: (row.captions, row.psnr_db) for row in rows_of_page(tmp_path / "it.md")} == {
        "one process": (1, MAX_DB),
        STALE.label: (2, 30.0),
        NAIVE.label: (1, 30.0),
        FRESH.label: (1, 2.0),
    }
    assert quality.write_documents(options, [], "of another model") == 2


def test_rows_of_earlier_weights_stay_in_sections_of_their_own(tmp_path: Path) -> None:
    page, options = tmp_path / "it.md", quality.parse(["--table", str(tmp_path / "it.md")])
    assert quality.write_documents(options, [record(), record(STALE)], "abc") == 0
    assert "trained further" not in page.read_text()
    new = record(setting=replace(SETTING, model="def"), psnr_db=55.0)
    assert quality.write_documents(options, [new], "def") == 0
    found = {(row.setting.model, row.label): row.psnr_db for row in rows_of_page(page)}
    assert found == {("abc", new.label): 30.0, ("abc", STALE.label): 30.0, ("def", new.label): 55.0}
    assert "its weights are those of `def`" in page.read_text()
    assert page.read_text().count(f"## {SETTING}\n") == 2


def test_captions_generated_later_go_on_where_the_table_ends(tmp_path: Path) -> None:
    page, options = tmp_path / "it.md", quality.parse(["--table", str(tmp_path / "it.md")])
    assert quality.write_documents(options, [record(), record(caption=1, psnr_db=20.0)], "abc") == 0
    later = [record(caption=number, psnr_db=14.0, ssim=0.8, lpips=0.1) for number in (2, 3, 4)]
    for _ in range(2):
        assert quality.write_documents(options, later, "abc") == 0
        (row,) = rows_of_page(page)
        assert (row.captions, row.worst_db, row.exact_steps) == (5, 14.0, 5)
        assert (row.psnr_db, row.ssim, row.lpips) == pytest.approx((18.4, 0.86, 0.08))
    (row,) = with_measured([row], rows_of([record(caption=5, lpips=None)]))
    assert (row.captions, row.lpips) == (6, None)


def test_captions_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = quality.parse(["--table", str(tmp_path / "it.md")])
    assert quality.write_documents(options, [record(caption=3)], "abc") == 2
    assert quality.write_documents(options, [record()], "abc") == 0
    assert quality.write_documents(options, [record(caption=3)], "abc") == 2
    assert (
        "generated from caption 3 on, and the table has 1 of it: generate the others too (--first 1)"
        in capsys.readouterr().err
    )
    assert [row.captions for row in rows_of_page(tmp_path / "it.md")] == [1]


def test_nothing_measured() -> None:
    for write in (table, plot):
        with pytest.raises(ValueError, match="leave flags out, or measure first"):
            write([])


def test_documents_are_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = quality.parse(["--table", str(tmp_path / "it.md")])
    assert quality.write_documents(options, [record()], "abc") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.json", "it.md"]
    options = quality.parse(["--plot", str(tmp_path / "it.svg")])
    assert quality.write_documents(options, [], "abc") == 2
    assert "measure first" in capsys.readouterr().err


def circles(svg: str) -> list[dict[str, str]]:
    return [each.attrib for each in ElementTree.fromstring(svg) if each.tag.endswith("circle")]


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("text")]


def test_the_plot(tmp_path: Path) -> None:
    cheap, dear = record(FRESH, psnr_db=45.0, bytes_per_step=1e5), record(STALE, psnr_db=30.0, bytes_per_step=1e6)
    control = record(NAIVE, psnr_db=11.0, bytes_per_step=1e4)
    few = record(EXACT, setting=replace(SETTING, steps=50))
    exact = record(EXACT, psnr_db=140.0, bytes_per_step=1e6)
    write_plot(tmp_path / "new" / "it.svg", rows_of([cheap, dear, control, few, exact]))
    svg = (tmp_path / "new" / "it.svg").read_text()
    exactly, one, two, three = circles(svg)
    assert float(three["cx"]) < float(one["cx"]) < float(two["cx"])
    assert float(one["cx"]) - float(three["cx"]) == pytest.approx(float(two["cx"]) - float(one["cx"]), abs=0.2)
    assert float(exactly["cy"]) < float(one["cy"]) < float(two["cy"]) < float(three["cy"])
    assert (three["fill"], one["fill"]) == ("white", one["stroke"])
    assert {"exact (140 dB)", FRESH.label, "displaced", "naive (control)"} <= set(texts(svg))
    assert any("20 steps" in text and "4 ranks" in text and "1 captions" in text for text in texts(svg))
    with pytest.raises(ValueError, match=r"\.svg"):
        write_plot(tmp_path / "it.jpg", rows_of([cheap]))


def test_points_are_told_apart_by_their_exact_steps_where_nothing_else_does() -> None:
    twice = record(Named.parse("displaced:warmup_steps=1"), exact_steps=1)
    part = [record(Named.parse(label)) for label in ("fresh-edges:quality=40", "displaced:group_norm=sync")]
    found = texts(plot(rows_of([record(STALE), twice, record(FRESH), *part])))
    assert {"displaced, 5 exact", "displaced, 1 exact", FRESH.label} <= set(found)
    assert len(circles(plot(rows_of([record(STALE), twice, record(FRESH), *part])))) == 3


def test_labels_of_close_points_do_not_cover_each_other() -> None:
    close = [record(STALE), record(FRESH, psnr_db=30.2), record(FROZEN, psnr_db=29.8), record(EXACT, psnr_db=29.5)]
    labels = {named.label for named in (STALE, FRESH, EXACT)} | {"frozen (control)"}
    boxes: list[Box] = []
    for each in ElementTree.fromstring(plot(rows_of([*close, record(NAIVE, psnr_db=9.0, bytes_per_step=1e4)]))).iter():
        if each.tag.endswith("text") and each.text in labels:
            side = 1 if each.attrib["text-anchor"] == "start" else -1
            boxes.append(_box(each.text, float(each.attrib["x"]), float(each.attrib["y"]), side))
    assert len(boxes) == 4
    assert sum(one.overlap(other) for one in boxes for other in boxes if one is not other) == 0


# --- figures and images -----------------------------------------------------------------------------------------


def test_the_meter() -> None:
    scene = sample_render("judge 3", height=128, width=128, held_out=True)
    good = Caption(index=0, text="", scene=scene.scene)
    exact = (to_tensor(scene.pixels) + 1) / 2
    noisy = (exact + 0.1 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    mirrored = replace(good, scene=flipped(scene.scene))
    assert mirrored.scene != good.scene
    meter = Meter(load_classifier(), None)
    same, worse = meter.compare(torch.cat([exact, noisy]), torch.cat([exact, exact]), [good, good])
    assert (same.psnr_db, same.ssim, same.lpips, same.right) == (MAX_DB, pytest.approx(1.0), None, True)
    assert 15 < worse.psnr_db < 25
    assert worse.ssim < 0.9
    assert not meter.compare(exact, exact, [mirrored])[0].right


def test_every_caption_has_its_own_seed() -> None:
    one, both = arguments(SETTING, CAPTIONS[1:2]), arguments(SETTING, CAPTIONS[:2])
    first, second = (torch.randn(3, generator=generator) for generator in both["generator"])
    assert torch.equal(torch.randn(3, generator=one["generator"][0]), second)
    assert not torch.equal(first, second)


def test_the_hash_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = hash_of(tmp_path)
    assert hash_of(tmp_path) == before
    (tmp_path / "a").write_text("y")
    assert hash_of(tmp_path) != before


def test_exact_images_are_the_pipelines_own_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneProcess(embedded_model(), tmp_path)
    setting = replace(SETTING, height=64, width=96, steps=2, scheduler="DPM++ 2M")
    found = one.exact(setting, CAPTIONS[:2])
    one.pipe.scheduler = one.scheduler("DPM++ 2M")
    plain = one.pipe(**arguments(setting, CAPTIONS[:2]) | {"output_type": "pt"}).images
    assert torch.allclose(found, plain, atol=1e-5)
    monkeypatch.setattr(one, "pipe", None)
    assert torch.equal(one.exact(setting, CAPTIONS[:2]), found)
    assert torch.equal(one.exact(setting, CAPTIONS[1:2]), found[1:])
    with pytest.raises(AttributeError):
        one.exact(replace(setting, scheduler="DDIM"), CAPTIONS[:1])


def test_an_unknown_method() -> None:
    with pytest.raises(PlanError, match="unknown strategy"):
        Named.parse("naively")
    assert Method(strategy="x") != Method(strategy="x", exchange="off")
