"""The feeds of all streams, by name."""

import threading
from typing import TypeVar

from starlette.types import ASGIApp

from patchpar.web.feed import ImageFeed, MediaFeed, VideoFeed
from patchpar.web.http_page import video_page
from patchpar.web.page_input import PageInputs, PageMicrophone
from patchpar.web.viewer import KEPT

__all__ = ["Feeds", "ImageFeed", "LiveFeed", "MediaFeed", "VideoFeed"]
MAX_FEEDS = 16  # more than run and wait in the queue of a page of its own
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
        self._feeds: dict[str, MediaFeed] = {}  # the oldest first

    def add(self, feed: F) -> F:
        """Register a feed. Beyond MAX_FEEDS the oldest one that is over is dropped, or else the oldest is closed.

        A page that begins streams and stops them again would otherwise end the one that another page watches.
        """
        with self._lock:
            self._feeds[feed.name] = feed
            while len(self._feeds) > MAX_FEEDS:
                old = min(self._feeds.values(), key=lambda each: not each.is_over)
                del self._feeds[old.name]
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
