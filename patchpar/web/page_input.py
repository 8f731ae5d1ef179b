"""What the page of a stream sends: audio of its microphone, images of its camera. One page at a time sends each."""

import io
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.image_file import read_image_file
from patchpar.media.pcm_pipe import PcmFormat

T = TypeVar("T")
MAX_BYTES = 1 << 20
"""Bytes of one message."""
MAX_PIXELS = 4096**2
"""Of an image."""
WAITING_PIECES = 100
"""Pieces of audio that may wait to be taken: 2 s of 20 ms each. Older ones are dropped."""


class PageInput(Generic[T]):
    """Pieces of one kind. `name`: what people call it. Thread-safe. The stream goes on without it."""

    ends = False

    def __init__(self, name: str, waiting: int) -> None:
        self.name = name
        self._changed = threading.Condition()
        self._pieces = deque[T](maxlen=waiting)
        self._sender: object = None
        self._is_over = False

    def begin(self, sender: object) -> None:
        """Take the pieces of this sender. Raises PlanError while another one sends."""
        with self._changed:
            if self._sender is not None and self._sender is not sender:
                raise PlanError(f"{self.name} is in use by another page: stop it there first")
            self._sender = sender

    def end(self, sender: object) -> None:
        """This sender has stopped, or has gone."""
        with self._changed:
            if self._sender is sender:
                self._sender = None

    def put(self, sender: object, piece: T) -> None:
        """Append a piece. Raises PlanError for a sender that has not begun."""
        with self._changed:
            if self._sender is not sender:
                raise PlanError(f"{self.name} has not begun: send its beginning first")
            self._pieces.append(piece)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def pieces(self) -> Iterator[T]:
        """Yield pieces as they come, until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._is_over)
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
            yield piece


class PageMicrophone(PageInput[tuple[Tensor, int]]):
    """Audio of the page: `audio` yields samples [channels, N] between -1 and 1, and their rate, as they come."""

    audio = PageInput.pieces

    def __init__(self) -> None:
        super().__init__("the microphone of the page", WAITING_PIECES)


class PageCamera(PageInput[Any]):
    """Images of the page: `images` yields PIL images as they come; of those that have not been taken, the newest."""

    images = PageInput.pieces

    def __init__(self) -> None:
        super().__init__("the camera of the page", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInputs:
    """What the page may send; None for what the stream does not take."""

    microphone: PageMicrophone | None = None
    camera: PageCamera | None = None

    @property
    def names(self) -> str:
        """Names of those that the stream takes, separated by spaces."""
        found = {"microphone": self.microphone, "camera": self.camera}
        return " ".join(name for name, each in found.items() if each is not None)

    def close(self) -> None:
        """End them. Idempotent."""
        for each in (self.microphone, self.camera):
            if each is not None:
                each.close()


def samples_of(data: bytes, form: PcmFormat) -> Tensor:
    """Return the samples [channels, N] of a message. Raises PlanError."""
    _check_size(data)
    if len(data) % form.size:
        raise PlanError(f"{len(data)} bytes of audio: samples of {form.channels} channels have {form.size} bytes")
    return form.samples(data)


def image_of(data: bytes) -> Any:
    """Return the PIL image of a file in JPEG, PNG or WebP, upright. Raises PlanError."""
    _check_size(data)
    return read_image_file(io.BytesIO(data), "the image", most_pixels=MAX_PIXELS, formats=("JPEG", "PNG", "WEBP"))


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise PlanError(f"a message of {len(data)} bytes: at most {MAX_BYTES} are taken")
