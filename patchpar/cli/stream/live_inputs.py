"""Live audio and images of `patchpar stream`: looked at before the ranks are started, read once a stream has begun."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from patchpar.cli.stream.flags import PAGE, device_of, kind_of
from patchpar.errors import PlanError
from patchpar.web.page_input import PageCamera, PageInputs, PageMicrophone

if TYPE_CHECKING:
    from patchpar.cli.stream.flags import StreamFlags
    from patchpar.models.streaming.config import StreamConfig
    from patchpar.stream.live_inputs import Camera, LiveAudioInput, LiveImageInput
    from patchpar.stream.session import StreamSession


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveInputs:
    """What comes while a stream runs; None for what does not. `page`: what the page of --ws may send of it."""

    audio: LiveAudioInput | None = None
    images: LiveImageInput | None = None
    page: PageInputs = PageInputs()  # noqa: RUF009  frozen, and empty

    @classmethod
    def of(cls, request: StreamFlags, rate: int | None) -> LiveInputs:
        """Open what the flags name. `rate`: samples per second of the model, None if it takes no audio.

        Waits for the first bytes of a pipe. Raises PlanError.
        """
        microphone = PageMicrophone() if request.audio == PAGE else None
        camera = PageCamera() if request.input == PAGE else None
        if request.has_live_audio and rate is None:
            raise PlanError(f"--audio {request.audio}: this model takes no audio; leave it out")
        return cls(
            audio=microphone or _audio_of(request, rate or 0),
            images=camera or _images_of(request),
            page=PageInputs(microphone=microphone, camera=camera),
        )

    def begin(self, session: StreamSession, config: StreamConfig, fps: float) -> Callable[[], str]:
        """Start to read for a video stream; returns a function that says what is wrong with them."""
        from patchpar.stream.live_inputs import Camera, LiveAudio, LiveFrames

        found: list[LiveAudio | Camera] = []
        if self.audio is not None:
            found.append(LiveAudio(self.audio, session))
        if self.images is not None:
            camera = Camera(self.images)
            found.append(camera)
            LiveFrames(camera, session, fps, config.height, config.width).start()
        for each in found:
            each.start()
        return notes_of(*found)

    def camera(self, stack: ExitStack) -> tuple[Camera, Iterator[Any]]:
        """Start to read images for an image model, until `stack` is closed; returns the images too."""
        from patchpar.stream.live_inputs import Camera

        assert self.images is not None
        camera, is_over = Camera(self.images), threading.Event()
        stack.callback(is_over.set)
        camera.start()
        return camera, camera.images(is_over)


def notes_of(*inputs: Any) -> Callable[[], str]:
    """Return a function that joins the notes of live inputs, and prints what has changed to stderr."""
    printed = ""

    def note() -> str:
        nonlocal printed
        found = ". ".join(each.note for each in inputs if each.note)
        if found != printed:
            typer.echo(found or "the live inputs are there", err=True)
            printed = found
        return found

    return note


def _audio_of(request: StreamFlags, rate: int) -> LiveAudioInput | None:
    if request.audio is None or not request.has_live_audio:
        return None
    if not request.has_pipe:
        from patchpar.media.capture_device import microphone

        return microphone(device_of(request.audio))
    from patchpar.media.pcm_pipe import PcmFormat, PcmPipe

    raw = PcmFormat(rate=request.audio_rate or rate, channels=request.audio_channels or 1)
    is_standard = request.audio == "-"
    name = "standard input" if is_standard else request.audio
    typer.echo(f"waiting for audio from {name}", err=True)
    file = _standard_input() if is_standard else Path(request.audio).open("rb", 0)  # noqa: SIM115  to the end
    pipe = PcmPipe.open(file, name, raw)
    typer.echo(f"{name}: {pipe.format}", err=True)
    return pipe


def _standard_input() -> IO[bytes]:
    """Standard input without its buffer, whose lock a thread that reads would hold: Python aborts on exit then.

    Raises PlanError where it is closed.
    """
    if sys.stdin is None:
        raise PlanError("--audio -: standard input is closed: pipe audio into the command, or name a file or a pipe")
    buffer: Any = sys.stdin.buffer
    return getattr(buffer, "raw", buffer)


def _images_of(request: StreamFlags) -> LiveImageInput | None:
    if request.input is None or kind_of(request.input) != "camera":
        return None
    from patchpar.media.capture_device import camera

    return camera(device_of(request.input))
