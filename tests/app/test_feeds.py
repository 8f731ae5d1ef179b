"""The feeds of streams: found by their names only, and none goes on for ever."""

from __future__ import annotations

import re
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from app.feeds import MAX_FEEDS, Feeds, ImageFeed
from app.stream_tab import StreamTab

from .app_states import state_of
from .waits import over


def test_feeds_have_names_that_cannot_be_guessed_and_the_oldest_makes_room() -> None:
    feeds = Feeds()
    found = [feeds.add(ImageFeed()) for _ in range(MAX_FEEDS + 1)]
    assert len({feed.name for feed in found}) == MAX_FEEDS + 1
    assert all(re.fullmatch(r"live/[\w-]{22}", feed.address) for feed in found)
    assert feeds.get(found[0].name) is None
    assert found[0].is_over
    assert feeds.get(found[-1].name) is found[-1]
    assert feeds.get("nobody") is None
    feeds.close()
    assert found[-1].is_over


def test_streams_that_were_stopped_do_not_end_one_that_runs() -> None:
    """One page can begin and stop as many as it likes while another page watches its own."""
    feeds = Feeds()
    watched = feeds.add(ImageFeed())
    for _ in range(2 * MAX_FEEDS):
        feeds.add(ImageFeed()).close()
    assert feeds.get(watched.name) is watched
    assert not watched.is_over
    assert len(feeds._feeds) == MAX_FEEDS


def test_the_feed_of_a_job_that_is_cancelled_while_it_waits_is_over() -> None:
    """Its page shows the feed then, and a browser would wait for the first image for ever."""
    feed, go, stream = ImageFeed(), threading.Event(), SimpleNamespace(run=print)
    with closing(state_of()) as state:
        tab: Any = StreamTab(state)
        state.job_queue.submit("A", "image", lambda job: go.wait(10))
        job = tab._submit("B", feed, lambda *_: stream)
        tab.stop("B")
        assert over(job).state == "cancelled"
        assert feed.is_over
        go.set()
