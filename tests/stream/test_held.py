"""Ranks that a pipeline holds are ended with it, whatever its stream does."""

from __future__ import annotations

import threading

import pytest

from patchpar.errors import LaunchError, PlanError
from patchpar.stream import worker_group as held
from patchpar.stream.images.session import ImageSession, ImageStreamOptions
from patchpar.stream.worker_group import HeldRanks


class Ranks:
    """Busy with one step until they are ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def run(self, **_: object) -> None:
        assert self.ended.wait(60)
        raise LaunchError("the workers were closed during the call, by close()")

    def close(self) -> None:
        self.ended.set()


class Stubborn:
    """A session whose ranks never let go."""

    is_over = False

    def cancel(self) -> None: ...

    def is_free_within(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        raise PlanError("the ranks did not end the stream within 60 s")


def test_a_stream_in_the_middle_of_a_step_ends_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "SOON", 0.05)
    ranks = Ranks()
    pipe = HeldRanks[Ranks, ImageSession](ranks)
    pipe._session = ImageSession(ranks.run, ImageStreamOptions(ranks=1, seed=0), {})
    pipe.close()
    assert ranks.ended.is_set()
    assert pipe._session.is_free_within(0)
    pipe.close()


def test_two_threads_that_begin_a_stream_at_once_get_one() -> None:
    pipe, begins, results = HeldRanks[Ranks, Stubborn](Ranks()), threading.Event(), list[str]()

    def begin(name: str) -> None:
        try:
            with pipe._begun():
                second.start()
                begins.set()
                second.join(0.05)  # it would have the ranks by now, if it did not wait for this one
                pipe._session = Stubborn()
        except PlanError as error:
            results.append(str(error))
        else:
            results.append(name)

    first, second = (threading.Thread(target=begin, args=(name,)) for name in ("first", "second"))
    first.start()
    assert begins.wait(20)
    first.join(20)
    second.join(20)
    assert results[0] == "first"
    assert "a stream is running" in results[1]


@pytest.mark.parametrize("how", ["close", "cancel", "is_free_within"])
def test_ranks_are_ended_even_if_the_stream_cannot_be(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, *_: object) -> None:
        raise KeyboardInterrupt

    if how != "close":
        monkeypatch.setattr(Stubborn, how, interrupted)
    ranks = Ranks()
    pipe = HeldRanks[Ranks, Stubborn](ranks)
    pipe._session = Stubborn()
    with pytest.raises(PlanError if how == "close" else KeyboardInterrupt):
        pipe.close()
    assert ranks.ended.is_set()
