"""What a person or a model says is shown as it is, and never run."""

from __future__ import annotations

from html import escape

import pytest

from app import html
from app.job_queue import JobView

EVIL = '<img src=x onerror="alert(1)"> & <b>'


@pytest.mark.parametrize(
    "displayed",
    [
        html.failure(EVIL),
        html.notice(EVIL),
        html.caption(EVIL),
        html.pairs([(EVIL, EVIL)]),
        html.table([EVIL], [[EVIL]]),
        html.status(JobView(state="running", note=EVIL)),
        html.status(JobView(state="running", note=EVIL, step=1, steps=2)),
        html.status(JobView(state="failed", error=EVIL)),
    ],
)
def test_it_is_escaped(displayed: str) -> None:
    assert "<img" not in displayed
    assert "<b>" not in displayed
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt; &amp; &lt;b&gt;" in displayed


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (JobView(ahead=1), "Waiting: 1 job ahead."),
        (JobView(ahead=3), "Waiting: 3 jobs ahead."),
        (JobView(state="running", step=3, steps=12, note="generating"), "generating: step 3 of 12"),
        (JobView(state="running", step=3, steps=12, seconds_left=8.2), "step 3 of 12, about 9 s left"),
        (JobView(state="running", step=3, steps=12, seconds_left=200.0), "step 3 of 12, about 3 min left"),
        (JobView(state="cancelled"), "Cancelled. The workers are free."),
    ],
)
def test_a_job_says_how_it_stands(view: JobView | None, message: str) -> None:
    assert message in html.status(view)


def test_an_error_is_announced_and_the_chosen_row_marked() -> None:
    assert 'role="alert"' in html.status(JobView(state="failed", error="no"))
    assert html.table(["a"], [["1"], ["2"]], marked=1).count('class="marked"') == 1


def test_a_narrow_page_can_say_which_column_a_cell_is_of() -> None:
    displayed = html.table(["", EVIL], [["one", "2"]])
    assert '<td data-name="">one</td>' in displayed
    assert f'<td data-name="{escape(EVIL)}">2</td>' in displayed
    assert "stacked" in displayed
    assert "stacked" not in html.table(["a"], [["1"]], stacked=False)
