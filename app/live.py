"""Moving pictures on their way to a browser: one feed for each stream, found by a name that nobody can guess.

    stream --put--> feed <--looks-- any number of browsers

A slow browser misses pictures of a picture feed, and reads a film feed later; neither holds the stream up.
"""

import asyncio
import io
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, TypeVar

LOOK_SECONDS = 0.02
BOUNDARY = "patchpar-picture"
KEPT = 16  # feeds; what a page shows ends long before so many others have begun
QUALITY = 88  # of JPEG
F = TypeVar("F", bound="Feed")


class Feed:
    """Bytes of one stream, by the media type `kind`."""

    kind = ""

    def __init__(self) -> None:
        self.name = secrets.token_urlsafe(16)
        self.is_over = False

    @property
    def address(self) -> str:
        """Where the page finds it."""
        return f"/live/{self.name}"

    def close(self) -> None:
        """Nothing more will come."""
        self.is_over = True

    def parts(self) -> AsyncIterator[bytes]:
        """What one browser is sent, until the end."""
        raise NotImplementedError


class PictureFeed(Feed):
    """JPEG after JPEG, which every browser shows in an <img>. Only the newest is held."""

    kind = f"multipart/x-mixed-replace; boundary={BOUNDARY}"

    def __init__(self) -> None:
        super().__init__()
        self._newest: tuple[int, bytes] = (0, b"")

    @property
    def count(self) -> int:
        """How many pictures there were."""
        return self._newest[0]

    def put(self, picture: Any) -> None:
        """A new PIL picture."""
        data = io.BytesIO()
        picture.convert("RGB").save(data, "JPEG", quality=QUALITY)
        self._newest = (self._newest[0] + 1, data.getvalue())

    async def parts(self) -> AsyncIterator[bytes]:
        """See Feed. The last picture comes twice: browsers show one when the next begins."""
        seen = 0
        while True:
            is_over, (number, data) = self.is_over, self._newest
            if number != seen or (is_over and number):
                seen = number
                head = f"--{BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                yield head.encode() + data + b"\r\n"
            if is_over:
                yield f"--{BOUNDARY}--\r\n".encode()
                return
            await asyncio.sleep(LOOK_SECONDS)


class FilmFeed(Feed):
    """A fragmented MP4 with sound. All of it is held, so that a reloaded page begins at the beginning."""

    kind = "video/mp4"

    def __init__(self) -> None:
        super().__init__()
        self._fragments: list[bytes] = []

    def put(self, data: bytes) -> None:
        """More of the file."""
        if data:
            self._fragments.append(data)

    async def parts(self) -> AsyncIterator[bytes]:
        """See Feed."""
        sent = 0
        while True:
            is_over = self.is_over
            while sent < len(self._fragments):
                sent += 1
                yield self._fragments[sent - 1]
            if is_over:
                return
            await asyncio.sleep(LOOK_SECONDS)


class Feeds:
    """All that there are, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: OrderedDict[str, Feed] = OrderedDict()

    def add(self, feed: F) -> F:
        """A new one. The oldest makes room."""
        with self._lock:
            self._feeds[feed.name] = feed
            while len(self._feeds) > KEPT:
                _, old = self._feeds.popitem(last=False)
                old.close()
        return feed

    def get(self, name: str) -> Feed | None:
        """The one of this name."""
        with self._lock:
            return self._feeds.get(name)

    def close(self) -> None:
        """End all."""
        with self._lock:
            for feed in self._feeds.values():
                feed.close()
