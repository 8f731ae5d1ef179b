"""A delayed link hides the bare one below it, and what is recorded of several steps is the median of each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.forecast.delayed_links import COLUMNS, Measured, Row, cells, compared, kept, lines
from benchmarks.forecast.delayed_replay import RecordedRanks, RecordedTurn, bare_latency, replayed_step
from benchmarks.page import write_page
from patchpar.plan.link_model import LinkModel, TimedMessage

STEP, BARE, RECEIVING, BYTES = 0.1, 1e-3, 2e-3, 1000
COMPUTING = (STEP, STEP)


def ranks(age: int = 0, waits: float = RECEIVING) -> RecordedRanks:
    """Both compute and exchange the same; a message is needed at once, in this step or a later one."""
    message = TimedMessage(STEP / 2, STEP / 2, BYTES, age)
    step = RecordedTurn(seconds=STEP, messages=(message,), waits=(waits,))
    return RecordedRanks.of(1, [(step, step)])


def seconds(link: LinkModel, recorded: RecordedRanks) -> float:
    return replayed_step(recorded, link, COMPUTING, BARE)


def test_a_message_comes_over_the_slower_of_both_links_and_not_over_one_after_the_other() -> None:
    """As `DelayedWork` does, which waits for the bare link, receives, and sleeps until the time of arrival."""
    fresh = ranks()
    assert seconds(LinkModel(), fresh) == pytest.approx(STEP + BARE + RECEIVING)
    assert seconds(LinkModel(latency=2e-4), fresh) == pytest.approx(STEP + BARE + RECEIVING)
    assert seconds(LinkModel(latency=2e-2), fresh) == pytest.approx(STEP + 2e-2)
    assert seconds(LinkModel(latency=2e-4, rate=1e5), fresh) == pytest.approx(STEP + 2e-4 + 1e-2)


def test_a_stale_message_is_received_and_not_waited_for() -> None:
    stale = ranks(age=1)
    for link in (LinkModel(), LinkModel(latency=2e-2), LinkModel(latency=2e-4, rate=1e5)):
        assert seconds(link, stale) == pytest.approx(STEP + RECEIVING)
    too_slow = LinkModel(rate=BYTES / (2 * STEP))
    assert seconds(too_slow, stale) == pytest.approx(2 * STEP)


def test_a_message_that_is_sent_at_the_very_end_of_a_turn_does_not_begin_another_turn() -> None:
    """Medians of times, and that of a whole turn, are of different turns: the last one may lie behind its end."""
    message = TimedMessage(STEP + 1e-5, STEP / 2, BYTES, 1)
    step = RecordedTurn(seconds=STEP, messages=(message,), waits=(RECEIVING,))
    late = RecordedRanks.of(1, [(step, step)])
    assert seconds(LinkModel(), late) == pytest.approx(STEP + RECEIVING, rel=1e-3)


def test_each_round_pays_the_latency_once_and_ranks_that_differ_take_the_mean_of_both() -> None:
    """Three rounds in a step, needed at once, of ranks that compute g and h between two of them, on a latency of L.

    By hand: if rank 1 begins d later, rank 0 ends its round after d + h + L and rank 1 after g + L, counted from the
    beginning of rank 0. Rank 1 then begins g - h - d later, so that two rounds take g + h + 2 L.
    """
    messages = tuple(TimedMessage(at, at, BYTES) for at in (0.02, 0.05, 0.08))
    step = RecordedTurn(seconds=STEP, messages=messages, waits=(0.0,) * 3)
    recorded = RecordedRanks.of(1, [(step, step)])
    link = LinkModel(latency=2e-2)
    assert replayed_step(recorded, link, COMPUTING, 0.0) == pytest.approx(STEP + 3 * link.latency)
    assert replayed_step(recorded, link, (STEP, STEP / 2), 0.0) == pytest.approx(0.75 * STEP + 3 * link.latency)


def test_what_is_computed_between_sending_and_needing_hides_latency_and_messages_queue_at_their_sender() -> None:
    """By hand. Sent at 20 and 30 ms, 10 ms each on the link: they arrive at 50 and 60 ms, and are needed at 45 and 55.

    The first wait of 5 ms moves the second to 60 ms, when its message is there. At twice the bytes they leave at 40 and
    60 ms and arrive at 60 and 80, of which the first wait of 15 ms leaves 10 ms for the second.
    """

    def turn(num_bytes: int) -> RecordedRanks:
        messages = (TimedMessage(0.02, 0.045, num_bytes), TimedMessage(0.03, 0.055, num_bytes))
        step = RecordedTurn(seconds=STEP, messages=messages, waits=(0.0, 0.0))
        return RecordedRanks.of(1, [(step, step)])

    link = LinkModel(latency=2e-2, rate=BYTES / 0.01)
    assert replayed_step(turn(BYTES), link, COMPUTING, 0.0) == pytest.approx(STEP + 5e-3)
    assert replayed_step(turn(2 * BYTES), link, COMPUTING, 0.0) == pytest.approx(STEP + 15e-3 + 10e-3)


def test_the_latency_of_the_bare_link_is_found_from_a_step_on_it() -> None:
    assert bare_latency(ranks(), COMPUTING, STEP + BARE + RECEIVING) == pytest.approx(BARE, abs=1e-6)
    assert bare_latency(ranks(), COMPUTING, STEP) == 0.0


def test_a_turn_of_several_steps_is_replayed_as_they_follow_each_other() -> None:
    """Of two steps only the first exchanges. Control: with such a message in both, both wait."""

    def turn(*sent: float) -> RecordedRanks:
        messages = tuple(TimedMessage(at, at, BYTES) for at in sent)
        step = RecordedTurn(seconds=2 * STEP, messages=messages, waits=(0.0,) * len(sent))
        return RecordedRanks.of(2, [(step, step)])

    link = LinkModel(latency=2e-2)
    assert seconds(link, turn(STEP / 2)) == pytest.approx(STEP + 1e-2)
    assert seconds(link, turn(STEP / 2, 3 * STEP / 2)) == pytest.approx(STEP + 2e-2)


def test_of_several_turns_each_time_is_the_median_and_the_later_rank_tells_how_long_receiving_takes() -> None:
    """In the last both were disturbed. Which rank comes later changes from turn to turn."""

    def recorded(sent: float, *waits: float) -> list[RecordedTurn]:
        message = TimedMessage(sent, sent + 0.01, BYTES, 1)
        return [RecordedTurn(seconds=2 * sent, messages=(message,), waits=(wait,)) for wait in waits]

    found = RecordedRanks.of(1, [recorded(0.05, 0.002, 0.03), recorded(0.052, 0.04, 0.0022), recorded(0.3, 0.5, 0.6)])
    assert found.receiving == (0.0022,)
    assert [rank.messages for rank in found.ranks] == [(TimedMessage(0.052, 0.062, BYTES, 1),)] * 2
    assert [rank.seconds for rank in found.ranks] == [0.104, 0.104]


SLEPT = 0.02
"""Seconds that a rank computes longer on a link on which it sleeps."""


def row_of(longer: float, waited: float) -> Row:
    """On a link of 20 ms, where a step has waits of so many seconds."""
    real = Measured(STEP + longer + waited, (STEP + longer,) * 2)
    bare = Measured(STEP + BARE + RECEIVING, COMPUTING)
    return compared("exact", ranks(), LinkModel(latency=2e-2), real, (bare, bare))


def test_what_ranks_compute_longer_on_a_link_is_told_from_what_they_wait_longer() -> None:
    slower, waits = row_of(SLEPT, 2e-2), row_of(0.0, 2e-2 + SLEPT)
    assert (slower.longer, waits.longer) == (pytest.approx(SLEPT), pytest.approx(0.0))
    assert slower.off == pytest.approx(waits.off) == pytest.approx(-SLEPT / (STEP + 2e-2 + SLEPT))
    assert slower.off_here == pytest.approx(0.0)
    assert waits.off_here == pytest.approx(waits.off), "the control: waits that are not predicted are an error"


def test_a_page_without_these_columns_is_measured_anew(tmp_path: Path) -> None:
    page = tmp_path / "links.md"
    row = cells(row_of(SLEPT, 2e-2))
    write_page("\n".join(lines([row])) + "\n", page)
    assert "0 of 1 rows within 5%, worst -14.3%" in page.read_text()
    assert "1 of 1 rows within 5%, worst +0.0%" in page.read_text()
    assert kept(page, ["pcpp"]) == [row]
    assert kept(page, ["exact"]) == []
    page.write_text(page.read_text().replace(COLUMNS[-1], "another"))
    assert kept(page, ["pcpp"]) == []
