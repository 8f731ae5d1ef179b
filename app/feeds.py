"""The feeds of all streams, by name."""

import threading
from collections import OrderedDict
from typing import TypeVar

from starlette.types import ASGIApp

from patchpar.stream.web.feed import ImageFeed, MediaFeed, VideoFeed
from patchpar.stream.web.http_page import video_page
from patchpar.stream.web.page_input import PageInputs, PageMicrophone
from patchpar.stream.web.viewer import KEPT

__all__ = ["Feeds", "ImageFeed", "LiveFeed", "MediaFeed", "VideoFeed"]
MAX_FEEDS = 16  # a stream that a page shows ends long before this many others have started
F = TypeVar("F", bound=MediaFeed)


class LiveFeed(VideoFeed):
    """A video that is made from the microphone of who watches it. Only its last seconds are stored.

    `page`: that of `patchpar stream`, which plays it and sends the microphone; the application around it checks host
    names. `status`: the line below the video.
    """

    def __init__(self) -> None:
        super().__init__(KEPT)
        self.microphone, self.status = PageMicrophone(), "starting"
        inputs = PageInputs(microphone=self.microphone)
        self.page: ASGIApp = video_page(self, lambda: self.status, ["*"], inputs)

    def close(self) -> None:
        """End the feed and its microphone."""
        self.microphone.close()
        super().close()


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
