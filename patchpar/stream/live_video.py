"""Frames of a camera for a stream: the newest image, by a clock for video models, when asked for image models."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

from PIL import Image

from patchpar.errors import PatchparError
from patchpar.stream.live_audio import LOOK_SECONDS, QUIET_SECONDS, LiveReader
from patchpar.stream.session import StreamSession
from patchpar.stream.video_source import load_reference_image

GREY = (128, 128, 128)
"""The frames of a video before the first image."""


class LiveImageInput(Protocol):
    """Where live images come from. `name`: as in "the camera"."""

    @property
    def name(self) -> str:
        """What people call it."""

    def images(self) -> Iterator[Any]:
        """Yield PIL images as they come. Raises PlanError."""


class Camera(LiveReader):
    """Keeps the newest image of `source`. A source that fails does not end the stream.

    `newest`: the number of the newest image, from 1 on, and the image; (0, None) before the first.
    """

    def __init__(self, source: LiveImageInput) -> None:
        super().__init__(source, "patchpar-camera")
        self.newest: tuple[int, Any] = (0, None)

    @property
    def note(self) -> str:
        """What is wrong with the source, as a sentence; empty if nothing is."""
        last = "its last image stays" if self.newest[0] else "the stream has no image of it"
        if self._error is not None:
            return f"{self._error}; {last}"
        if self._has_ended:
            return f"{self._source.name} has stopped; {last}"
        if self._received_at is None:
            return f"no image from {self._source.name} yet"
        return f"no image from {self._source.name} any more; {last} until it goes on" if self._is_quiet else ""

    def images(self, is_over: threading.Event) -> Iterator[Any]:
        """Yield the newest image again and again, each once as long as new ones come, until `is_over` is set.

        Raises PatchparError if the source fails before its first image.
        """
        seen = 0
        while not is_over.is_set():
            begin = time.monotonic()
            while self.newest[0] == seen and not is_over.wait(LOOK_SECONDS):
                if self._error is not None and not seen:
                    raise self._error
                if seen and time.monotonic() > begin + QUIET_SECONDS:
                    break
            seen, image = self.newest
            if seen and not is_over.is_set():
                yield image

    def _read(self) -> None:
        for image in self._source.images():
            self.newest = (self.newest[0] + 1, image)
            self._received_at = time.monotonic()


class LiveFrames:
    """Pushes the newest image of a camera to `session` `fps` times a second, cropped and scaled, in a thread.

    `height`, `width`: pixels. Before the first image frames are grey. The thread ends with the stream.
    """

    def __init__(self, camera: Camera, session: StreamSession, fps: float, height: int, width: int) -> None:
        self._camera, self._session, self._period = camera, session, 1 / fps
        self._size, self._fitted = (width, height), partial(load_reference_image, height=height, width=width)
        self._thread = threading.Thread(target=self._run, name="patchpar-frames", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        seen, frame = 0, self._fitted(Image.new("RGB", self._size, GREY))
        due = time.monotonic()
        while not self._session.is_over:
            number, image = self._camera.newest
            if number != seen:
                seen = number
                try:
                    frame = self._fitted(image)
                except PatchparError as error:  # the frame before stays
                    self._camera.fail(error)
            try:
                self._session.push_frame(frame)
            except PatchparError:  # the stream is over
                return
            due = max(due + self._period, time.monotonic() - self._period)  # what was missed is not made up
            time.sleep(max(0.0, due - time.monotonic()))
