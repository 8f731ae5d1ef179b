"""Live web page of a stream: frames as images, or a video with audio."""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.mp4_fragments import FragmentEncoder
from patchpar.web.feed import ImageFeed, MediaFeed, VideoFeed
from patchpar.web.frame_player import FramePlayer
from patchpar.web.page_input import PageInputs
from patchpar.web.server import WebServer, names_of

KEPT = 4
"""Key frames of a video that are stored: some seconds by which a browser may lag without missing frames."""
LINGER_SECONDS = 2.0
"""Seconds that browsers have to fetch the rest at the end."""


class WebPage:
    """A web page, from construction to `close`. Raises PlanError for a port that is not free or missing packages."""

    def __init__(self, feed: MediaFeed, host: str, port: int, flag: str) -> None:
        missing = [name for name in ("fastapi", "uvicorn", "websockets") if find_spec(name) is None]
        if missing:
            raise PlanError(f"{flag} needs {', '.join(missing)}: pip install 'patchpar[serve]'")
        self.feed, self.status = feed, "starting"
        self._names, self._port = names_of(host), WebServer(host, port, flag)
        self.url = self._port.url

    def open(self, application: Callable[[Any, Callable[[], str], list[str]], Any]) -> None:
        """Start serving. Raises LaunchError."""
        self._port.serve(application(self.feed, lambda: self.status, self._names), grace=1)

    def close(self) -> None:
        """Stop serving, after browsers have fetched the rest or LINGER_SECONDS. Idempotent."""
        self.feed.close()
        give_up = time.monotonic() + LINGER_SECONDS
        while self.feed.watchers and time.monotonic() < give_up:
            time.sleep(0.02)
        self._port.close()


class ImageScreen:
    """Frames as MJPEG, which every browser displays, without audio. Raises PlanError."""

    def __init__(self, host: str, port: int, fps: float) -> None:
        self._feed = ImageFeed()
        self.page = WebPage(self._feed, host, port, "--mjpeg")
        self._player = FramePlayer(self._feed.put_frame, fps)

    def open(self) -> None:
        """Start serving. Raises LaunchError."""
        from patchpar.web.http_page import image_page  # needs the extra that WebPage checks

        self._player.start()
        self.page.open(image_page)

    def show(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> None:
        """Queue frames [F, H, W, 3] for all browsers, without waiting for them."""
        self._player.add(frames_FHWC)

    def close(self) -> None:
        """Stop serving after all frames have been sent. Idempotent."""
        self._player.close()
        self.page.close()


class VideoFeedWriter:
    """Encodes a stream to a feed of fragmented MP4, with audio of `rate` samples per second."""

    def __init__(self, feed: VideoFeed, fps: float, rate: int | None) -> None:
        self._feed, self._fps, self._rate = feed, fps, rate
        self._encoder: FragmentEncoder | None = None

    def add(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> None:
        """Encode frames and audio for all who watch, without waiting for them. Raises PlanError for odd sizes."""
        if self._encoder is None:
            height, width = frames_FHWC.shape[1:3]
            self._encoder = FragmentEncoder(self._fps, height, width, self._rate)
        fragments = self._encoder.add(frames_FHWC, pts, audio_N)
        if fragments:
            self._feed.put(self._encoder.head, fragments)

    def close(self) -> None:
        """Encode the rest. Idempotent."""
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            fragments = encoder.close()
            self._feed.put(encoder.head, fragments)


class VideoScreen:
    """Fragmented MP4 over a WebSocket, with audio of `rate` samples per second. Raises PlanError.

    `inputs`: what its page may send. `webrtc`: whether the page plays it by WebRTC, which needs another extra.
    """

    def __init__(
        self,
        host: str,
        port: int,
        fps: float,
        rate: int | None,
        inputs: PageInputs | None = None,
        *,
        webrtc: bool = False,
    ) -> None:
        if webrtc and find_spec("aiortc") is None:
            raise PlanError("--webrtc needs aiortc: pip install 'patchpar[rtc]'")
        self._feed, self._inputs = VideoFeed(KEPT), inputs or PageInputs()
        self.page = WebPage(self._feed, host, port, "--ws")
        self._writer = VideoFeedWriter(self._feed, fps, rate)
        self._peers: Any = None
        if webrtc:
            from patchpar.web.webrtc import RtcPeers

            self._peers = RtcPeers(fps, rate, self._inputs)

    def open(self) -> None:
        """Start serving. Raises LaunchError."""
        from patchpar.web.http_page import video_page

        self.page.open(partial(video_page, inputs=self._inputs, peers=self._peers))

    def show(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> None:
        """Queue frames and audio for all browsers, without waiting for them. Raises PlanError for odd sizes."""
        if self._peers is not None:
            self._peers.add(frames_FHWC, audio_N)
        self._writer.add(frames_FHWC, pts, audio_N)

    def close(self) -> None:
        """Encode the rest and stop serving. Idempotent."""
        self._inputs.close()
        if self._peers is not None:
            self._peers.close()
        self._writer.close()
        self.page.close()
