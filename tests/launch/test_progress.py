"""Who is stuck and who is only slow, from what ranks show of themselves: time is given, not waited for."""

from collections.abc import Callable, Sequence

import pytest

from patchpar.launch.hang_detection import WORK_FRACTION, WORK_TIMES, HangLimits, RankActivity, RequestProgress

DEADLINE = 60.0
Show = Callable[[float], RankActivity]


def working(second: float) -> RankActivity:
    """In one long kernel, on a core that it shares with eleven others."""
    return RankActivity(beats=5, work=100 + second / 12, waits=False)


def computing(second: float) -> RankActivity:
    """A layer every ten seconds."""
    return RankActivity(beats=5 + int(second / 10), work=100 + second, waits=False)


def waiting(second: float) -> RankActivity:
    """For another rank, asleep."""
    return RankActivity(beats=5, work=100 + second / 10_000, waits=True)


def spinning(second: float) -> RankActivity:
    """For another rank, and the processor with it."""
    return RankActivity(beats=5, work=100 + second, waits=True)


def asleep(second: float) -> RankActivity:
    """Answering pings: a stopped process does not do even that."""
    return RankActivity(beats=5, work=100 + second / 5_000, waits=False)


def resting(second: float) -> RankActivity:
    """Waiting for the caller, and saying so every five seconds."""
    return RankActivity(beats=5 + int(second / 5), work=100 + second / 10_000, waits=True)


def receiving(second: float) -> RankActivity:
    """For another rank, a part of whose message comes every twenty seconds."""
    return RankActivity(beats=5, work=100 + second / 10_000, waits=True, moved=int(second / 20))


def until(change: float, before: Show, after: Show) -> Show:
    return lambda second: (before if second < change else after)(second)


def first_stuck(
    shows: Sequence[Show], limits: HangLimits, seconds: float = 1e5, look: float = 0.5
) -> tuple[float, list]:
    """(when, who) is found to be stuck; (seconds, []) if nobody is in so long."""
    progress = RequestProgress(limits, {rank: show(0.0) for rank, show in enumerate(shows)})
    for number in range(1, int(seconds / look)):
        progress.pass_time(look, {rank: show(number * look) for rank, show in enumerate(shows)})
        found = progress.stuck(range(len(shows)))
        if found:
            return number * look, found
    return seconds, []


LIMITS = HangLimits.of_call(DEADLINE, 0.0)


@pytest.mark.parametrize(
    "shows",
    [
        [working, waiting],
        [working, spinning, waiting],
        [computing, waiting],
        [until(1500, working, computing), waiting],
        [until(900, working, waiting), until(900, waiting, working)],
        [resting, waiting],
        [receiving, waiting],
    ],
    ids=lambda shows: "+".join(show.__name__ for show in shows),
)
def test_slow_is_not_stuck(shows):
    assert first_stuck(shows, LIMITS, seconds=1700) == (1700, [])


@pytest.mark.parametrize(
    ("shows", "who"),
    [
        ([asleep, waiting], [0]),
        ([waiting, asleep, spinning], [1]),
        ([computing, asleep], [1]),
        ([working, asleep], [1]),
        ([resting, asleep], [1]),
        ([asleep, asleep], [0, 1]),
        ([waiting, waiting], [0, 1]),
        ([spinning, spinning], [0, 1]),
    ],
    ids=lambda value: "+".join(show.__name__ for show in value) if callable(value[0]) else "",
)
def test_who_stands_still_is_found_after_the_deadline_whatever_the_others_do(shows, who):
    when, found = first_stuck(shows, LIMITS)
    assert found == who
    assert DEADLINE < when <= DEADLINE + 2


def test_one_that_stops_in_the_middle_is_found_a_deadline_later():
    when, found = first_stuck([until(500, working, asleep), waiting], LIMITS)
    assert found == [0]
    assert DEADLINE - 20 < when - 500 <= DEADLINE + 2, "less what its last work did not come to"


def test_a_rank_that_waited_long_has_all_its_time_when_the_message_is_there():
    when, found = first_stuck([until(900, waiting, asleep), until(900, working, waiting)], LIMITS)
    assert found == [0]
    assert 900 + DEADLINE <= when <= 900 + DEADLINE + 2


def test_an_endless_loop_comes_to_an_end():
    when, found = first_stuck([working, waiting], LIMITS)
    assert found == [0]
    assert WORK_TIMES * DEADLINE < when <= WORK_TIMES * DEADLINE + 2


def test_what_is_expected_of_a_call_is_added():
    limits = HangLimits.of_call(DEADLINE, 3600.0)
    assert first_stuck([asleep, waiting], limits)[0] == pytest.approx(3660, abs=2)
    assert first_stuck([working, waiting], limits)[0] == pytest.approx(3600 + WORK_TIMES * DEADLINE, abs=2)


def test_a_start_has_its_time_and_no_more():
    assert first_stuck([working, asleep], HangLimits.of_start(600.0)) == (pytest.approx(600, abs=1), [0, 1])


@pytest.mark.parametrize(("fraction", "is_work"), [(0.5 * WORK_FRACTION, False), (1.5 * WORK_FRACTION, True)])
def test_how_little_work_is_work(fraction, is_work):
    def show(second: float) -> RankActivity:
        return RankActivity(beats=0, work=second * fraction, waits=False)

    when, _ = first_stuck([show], LIMITS)
    assert (when > 10 * DEADLINE) is is_work


def test_a_word_is_progress_and_so_is_that_of_a_rank_that_has_ended():
    progress = RequestProgress(LIMITS, dict(enumerate([waiting(0.0), waiting(0.0)])))
    for second in range(1, 200):
        progress.pass_time(1.0, dict(enumerate([waiting(second), waiting(second)])))
        if second % 50 == 0:
            progress.count_message(1)
    assert not progress.stuck([0])
    assert progress.quiet == 49
    assert progress.waits(0)
    assert not progress.works(0)
