"""The feeds of all streams, by name."""

import threading
from collections import OrderedDict
from typing import TypeVar

from patchpar.stream.web.feed import ImageFeed, MediaFeed, VideoFeed

__all__ = ["Feeds", "ImageFeed", "MediaFeed", "VideoFeed"]
MAX_FEEDS = 16  # a stream that a page shows ends long before this many others have started
F = TypeVar("F", bound=MediaFeed)


class Feeds:
    """All open feeds, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: OrderedDict[str, MediaFeed] = OrderedDict()

    def add(self, feed: F) -> F:
        """Register a feed. Beyond MAX_FEEDS the oldest is closed."""
        with self._lock:
            self._feeds[feed.name] = feed
            while len(self._feeds) > MAX_FEEDS:
                _, old = self._feeds.popitem(last=False)
                old.close()
        return feed

    def get(self, name: str) -> MediaFeed | None:
        """The feed of this name, or None."""
        with self._lock:
            return self._feeds.get(name)

    def close(self) -> None:
        """Close all feeds."""
        with self._lock:
            for feed in self._feeds.values():
                feed.close()
