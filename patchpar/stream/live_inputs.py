"""Microphones, pipes and cameras of a stream, read in threads: audio as it comes, the newest image by a clock."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from patchpar.errors import PatchparError
from patchpar.stream.session import StreamSession
from patchpar.stream.video_source import load_reference_image

AHEAD_SECONDS = 2.0
"""Seconds of audio that may wait for their blocks; a pipe that is faster is read no further until then."""
QUIET_SECONDS = 1.0
"""Seconds without audio, or images, that are worth a note."""
LOOK_SECONDS = 0.02
GREY = (128, 128, 128)
"""The frames of a video before the first image."""


class LiveImageInput(Protocol):
    """Where live images come from. `name`: what people call it, as in "the camera"."""

    @property
    def name(self) -> str: ...

    def images(self) -> Iterator[Any]:
        """Yield PIL images as they come. Raises PlanError."""


class LiveAudioInput(Protocol):
    """Where live audio comes from. `name`: see LiveImageInput. `ends`: the stream ends with it, or silence follows."""

    @property
    def name(self) -> str: ...

    @property
    def ends(self) -> bool: ...

    def audio(self) -> Iterator[tuple[Tensor, int]]:
        """Yield samples [N] or [channels, N] between -1 and 1, and their rate, as they come. Raises PlanError."""


class LiveReader:
    """A thread that reads `source`, and what is wrong with it. `_read` notes when something has come."""

    def __init__(self, source: Any, thread: str) -> None:
        self._source = source
        self._error: PatchparError | None = None
        self._received_at: float | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        """Start the thread. It ends with the source, or with the first piece of audio after the stream."""
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """Note what is wrong with the source, or with what came from it."""
        if not isinstance(error, PatchparError):
            error = PatchparError(f"{self._source.name} cannot be read: {error}")
        self._error = error

    @property
    def _is_quiet(self) -> bool:
        return self._received_at is not None and time.monotonic() > self._received_at + QUIET_SECONDS

    def _run(self) -> None:
        try:
            self._read()
            self._has_ended = True
        except Exception as error:  # noqa: BLE001  of a file or a device
            self.fail(error)

    def _read(self) -> None:
        raise NotImplementedError


class LiveAudio(LiveReader):
    """Pushes the audio of `source` to `session`. A source that is silent, or fails and not `ends`, ends no stream."""

    def __init__(self, source: LiveAudioInput, session: StreamSession) -> None:
        super().__init__(source, "patchpar-live-audio")
        self._session = session

    @property
    def note(self) -> str:
        """What is wrong with the source, as a sentence; empty if nothing is."""
        if self._error is not None:
            return f"{self._error}; the stream {'ends there' if self._source.ends else 'goes on with silence'}"
        if self._has_ended:
            return "" if self._source.ends else f"{self._source.name} has stopped; the stream goes on with silence"
        meanwhile = "there is silence" if self._session.is_kept_alive else "the stream waits"
        if self._received_at is None:
            return f"no audio from {self._source.name} yet; {meanwhile} until then"
        return f"no audio from {self._source.name} any more; {meanwhile} until it goes on" if self._is_quiet else ""

    def _read(self) -> None:
        session = self._session
        for samples, rate in self._source.audio():
            self._received_at = time.monotonic()
            while session.audio_ahead > AHEAD_SECONDS and not session.is_over:
                time.sleep(LOOK_SECONDS)
                self._received_at = time.monotonic()
            session.push_audio(samples, rate)
        self._has_ended = True
        if self._source.ends:
            session.end_audio()

    def fail(self, error: Exception) -> None:
        """Note an error. What ends the stream ends it so too, which would wait for audio otherwise."""
        if self._session.is_over:
            return
        super().fail(error)
        if self._source.ends:
            with suppress(PatchparError):  # it is over by now
                self._session.end_audio()


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
