"""What a notebook shows of a call, and what Python shows in a line."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from patchpar.pipeline.notebook_html import BAR_WIDTH, HEIGHT, html_of_plan
from patchpar.pipeline.rank_stats import RankStats, StepStats
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan

STEP = StepStats(bytes_sent={"kv": 1024}, bytes_received={"kv": 1024}, seconds_waited={"kv": 0.25})


def run_of(*waited: float, device: str = "cpu", seconds: float = 2.0) -> Run:
    ranks = tuple(
        RankStats(
            rank=rank,
            device=device,
            bytes_sent={"kv": 1024, "halo": 512},
            bytes_received={"kv": 1024},
            seconds_waited={"kv": each},
            steps=(STEP,) * 50,
        )
        for rank, each in enumerate(waited)
    )
    return Run(plan=Plan(patch=2), seconds=seconds, ranks=ranks)


class Page(HTMLParser):
    """Texts, open tags and widths of bars of a page; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.seen: set[str] = set()
        self.texts: list[str] = []
        self.widths: list[int] = []
        self.feed(text)
        assert self.tags == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.seen.add(tag)
        for part in dict(attrs).get("style", "").split(";"):
            name, _, value = part.partition(":")
            if name == "width":
                self.widths.append(int(value.removesuffix("px")))

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_python_shows_one_line() -> None:
    run = run_of(0.5, 1.0)
    assert repr(run) == f"<Run: {run}>"
    assert len(repr(run)) < 200
    assert "\n" not in repr(run)


def test_a_bar_for_each_rank_with_the_part_that_it_waited() -> None:
    page = Page(run_of(0.5, 1.0)._repr_html_())
    assert page.widths == [BAR_WIDTH * 3 // 4, BAR_WIDTH // 4, BAR_WIDTH // 2, BAR_WIDTH // 2]
    assert {"0.50 s (25%)", "1.00 s (50%)", "1.5 KiB"} <= set(page.texts)
    assert page.texts[0] == str(run_of(0.5, 1.0))


def test_waits_longer_than_the_call_fill_the_bar_and_no_time_is_no_part() -> None:
    assert Page(run_of(9.0)._repr_html_()).widths == [0, BAR_WIDTH]
    assert Page(run_of(0.0, seconds=0.0)._repr_html_()).widths == [BAR_WIDTH, 0]


def test_names_are_text() -> None:
    page = Page(run_of(0.5, device="<script>alert(1)</script>")._repr_html_())
    assert "script" not in page.seen
    assert "<script>alert(1)</script>" in page.texts


def test_a_plan_has_a_column_for_each_branch_and_a_box_for_each_band() -> None:
    text = html_of_plan("two branches", Plan(cfg=2, patch=2), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
    page = Page(text)
    assert page.texts == [
        *("two branches", "negative prompt", "rank 0 on cuda:0", "rank 1 on cuda:1"),
        *("prompt", "rank 2 on cuda:2", "rank 3 on cuda:3"),
    ]
    assert text.count(f"height:{HEIGHT // 2}px") == 4


def test_bands_are_as_high_as_their_parts_and_ranks_that_divide_a_band_are_in_one_box() -> None:
    text = html_of_plan("3:1", Plan(patch=2, ratio=(3, 1)), ["cpu", "cpu"])
    assert f"height:{HEIGHT * 3 // 4}px" in text
    assert f"height:{HEIGHT // 4}px" in text
    assert Page(html_of_plan("", Plan(data=2, tensor=2), ["cpu"] * 4)).texts == [
        *("prompts 1 of 2", "rank 0 on cpu, rank 1 on cpu", "prompts 2 of 2", "rank 2 on cpu, rank 3 on cpu")
    ]


def test_without_a_plan_there_is_the_title_and_it_is_text() -> None:
    page = Page(html_of_plan("<b>closed</b>", None, ()))
    assert page.texts == ["<b>closed</b>"]
    assert "b" not in page.seen
