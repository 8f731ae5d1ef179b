"""The feeds of streams: found by their names only, and none goes on for ever."""

from __future__ import annotations

import re

from app.feeds import MAX_FEEDS, Feeds, ImageFeed


def test_feeds_have_names_that_cannot_be_guessed_and_the_oldest_makes_room() -> None:
    feeds = Feeds()
    found = [feeds.add(ImageFeed()) for _ in range(MAX_FEEDS + 1)]
    assert len({feed.name for feed in found}) == MAX_FEEDS + 1
    assert all(re.fullmatch(r"/live/[\w-]{22}", feed.address) for feed in found)
    assert feeds.get(found[0].name) is None
    assert found[0].is_over
    assert feeds.get(found[-1].name) is found[-1]
    assert feeds.get("nobody") is None
    feeds.close()
    assert found[-1].is_over
