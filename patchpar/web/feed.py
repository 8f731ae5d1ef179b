"""Feeds from one stream to any number of browsers. A slow browser misses images or fragments.

    stream --put--> feed [ newest image, or newest fragments ] <--read-- any number of browsers

The stream never waits for a browser, and no browser has a queue: all read the same few images or fragments.
"""

import asyncio
import io
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from patchpar.media.mp4_fragments import Mp4Fragment, Mp4Header

if TYPE_CHECKING:
    from torch import Tensor

LOOK_SECONDS = 0.02
AGAIN_SECONDS = 0.5
"""Seconds after which an image is sent again if there is no newer one: browsers display it when the next begins."""
BOUNDARY = "patchpar-image"
QUALITY = 88
"""JPEG quality."""


class MediaFeed:
    """Bytes of one stream, of the media type `kind`. `watchers`: number of connected browsers.

    `name`: a random name that cannot be guessed, part of its address on a server of several streams.
    """

    kind = ""

    def __init__(self) -> None:
        self.name = secrets.token_urlsafe(16)
        self.is_over = False
        self.watchers = 0

    @property
    def address(self) -> str:
        """Path from a page that shows several streams: a proxy may have that page under a path of its own."""
        return f"live/{self.name}"

    def close(self) -> None:
        self.is_over = True

    def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes for one browser, until the end."""
        raise NotImplementedError

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1


class ImageFeed(MediaFeed):
    """MJPEG, which every browser displays in an <img>. Only the newest image is stored."""

    kind = f"multipart/x-mixed-replace; boundary={BOUNDARY}"

    def __init__(self) -> None:
        super().__init__()
        self._newest: tuple[int, bytes] = (0, b"")

    @property
    def count(self) -> int:
        return self._newest[0]

    def put(self, image: Any) -> None:
        """Replace the newest image by this PIL image."""
        data = io.BytesIO()
        image.convert("RGB").save(data, "JPEG", quality=QUALITY)
        self._newest = (self._newest[0] + 1, data.getvalue())

    def put_frame(self, frame_HWC: "Tensor") -> None:
        """Replace the newest image by this frame [H, W, 3] in uint8."""
        from PIL import Image

        self.put(Image.fromarray(frame_HWC.numpy()))

    async def parts(self) -> AsyncIterator[bytes]:
        """See MediaFeed. The last image is sent twice."""
        with self._watched():
            yield f"--{BOUNDARY}".encode()
            seen, sent_at = 0, 0.0
            while True:
                is_over, (number, data) = self.is_over, self._newest
                is_due = is_over or time.monotonic() > sent_at + AGAIN_SECONDS
                if number and (number != seen or is_due):
                    seen, sent_at = number, time.monotonic()
                    head = f"\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                    yield head.encode() + data + f"\r\n--{BOUNDARY}".encode()
                if is_over:
                    yield b"--\r\n"
                    return
                await asyncio.sleep(LOOK_SECONDS)


class VideoFeed(MediaFeed):
    """Fragmented MP4 with audio. `head`: what a player needs first; None before the first fragment.

    `kept`: number of key frames that are stored with the frames after them; None for the whole video, which a browser
    then plays from its beginning. A browser that falls behind the stored fragments continues at the newest key frame.
    """

    kind = "video/mp4"

    def __init__(self, kept: int | None = None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kept, self._first, self._fragments = kept, 0, deque[Mp4Fragment]()
        self._keys = deque[int]()  # numbers of the key frames' fragments
        self.head: Mp4Header | None = None

    def put(self, head: Mp4Header, fragments: Iterable[Mp4Fragment]) -> None:
        """Append fragments. `head` must always be the same."""
        with self._lock:
            self.head = head
            for fragment in fragments:
                if fragment.is_key:
                    self._keys.append(self._first + len(self._fragments))
                self._fragments.append(fragment)
            while self._kept is not None and len(self._keys) > self._kept:
                self._keys.popleft()
                while self._first < self._keys[0]:
                    self._fragments.popleft()
                    self._first += 1

    async def fragments(self) -> AsyncIterator[Mp4Fragment]:
        """Yield fragments until the end, from the first if all are stored, otherwise from the newest key frame."""
        with self._watched():
            number = self._before()
            while True:
                is_over, found = self.is_over, self._next(number)
                if found is not None:
                    number, fragment = found
                    yield fragment
                elif is_over:
                    return
                else:
                    await asyncio.sleep(LOOK_SECONDS)

    async def parts(self) -> AsyncIterator[bytes]:
        """See MediaFeed. The header, then fragments."""
        has_head = False
        async for fragment in self.fragments():
            if not has_head and self.head is not None:
                yield self.head.data
                has_head = True
            yield fragment.data

    def _before(self) -> int:
        """The number before that of the first fragment for a new browser."""
        with self._lock:
            return self._keys[-1] - 1 if self._keys and self._kept is not None else -1

    def _next(self, number: int) -> tuple[int, Mp4Fragment] | None:
        """Number and fragment after `number`, or the newest key frame if it is dropped; None if there is none yet."""
        with self._lock:
            wanted = number + 1
            if wanted < self._first:
                wanted = self._keys[-1]
            if wanted >= self._first + len(self._fragments):
                return None
            return wanted, self._fragments[wanted - self._first]
