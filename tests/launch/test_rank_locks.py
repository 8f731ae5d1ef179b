"""Which thread has which ranks."""

import threading

import pytest

from patchpar.launch.rank_locks import RankLocks


def test_an_interrupt_when_ranks_have_just_been_taken_gives_them_back():
    """Ctrl-C comes between any two instructions: nobody would ever have these ranks again."""

    class Interrupted(threading.Condition):
        def notify_all(self):
            locks._changed.__class__ = threading.Condition
            raise KeyboardInterrupt

    locks = RankLocks()
    locks._changed.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt), locks.holding((0, 1)):
        raise AssertionError("not reached")
    assert not locks.are_held_here
    with locks.holding((1,)):
        assert locks.are_held_here


def test_a_call_that_is_not_wanted_any_more_takes_no_ranks_that_are_free():
    def refuse():
        raise ValueError("cancelled")

    locks = RankLocks()
    with pytest.raises(ValueError, match="cancelled"), locks.holding((0,), refuse):
        raise AssertionError("not reached")
    assert not locks.are_held_here


def test_ranks_that_could_not_be_had_stay_with_those_who_have_them():
    def refuse():
        raise ValueError("cancelled")

    locks, refused = RankLocks(), []

    def wait():
        with pytest.raises(ValueError, match="cancelled"), locks.holding((0,), refuse):
            pass
        refused.append(True)

    with locks.holding((0,)):
        waits = threading.Thread(target=wait)
        waits.start()
        waits.join(20)
        assert refused == [True]
        assert locks.are_held_here
