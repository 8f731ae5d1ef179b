"""The feeds of all streams, each found by its name."""

import threading
from collections import OrderedDict
from typing import TypeVar

from patchpar.stream.web.feed import ImageFeed, MediaFeed, VideoFeed

__all__ = ["Feeds", "ImageFeed", "MediaFeed", "VideoFeed"]
KEPT = 16  # feeds; what a page shows ends long before so many others have begun
F = TypeVar("F", bound=MediaFeed)


class Feeds:
    """All that there are, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: OrderedDict[str, MediaFeed] = OrderedDict()

    def add(self, feed: F) -> F:
        """A new one. The oldest makes room."""
        with self._lock:
            self._feeds[feed.name] = feed
            while len(self._feeds) > KEPT:
                _, old = self._feeds.popitem(last=False)
                old.close()
        return feed

    def get(self, name: str) -> MediaFeed | None:
        """The one of this name."""
        with self._lock:
            return self._feeds.get(name)

    def close(self) -> None:
        """End all."""
        with self._lock:
            for feed in self._feeds.values():
                feed.close()
