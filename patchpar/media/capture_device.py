"""`CaptureDevice`: a microphone or a camera of this machine, through the input devices of FFmpeg in PyAV."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.launch.time_limit import TimedOut, time_limited
from patchpar.media.image_file import check_pixels

MICROPHONES = {
    "linux": (("pulse", "default"), ("alsa", "default")),
    "darwin": (("avfoundation", ":default"),),
    "win32": (("dshow", "audio={}"),),
}
CAMERAS = {
    "linux": (("v4l2", "/dev/video0"),),
    "darwin": (("avfoundation", "default"),),
    "win32": (("dshow", "video={}"),),
}
"""FFmpeg's names of the kind of device and of the device, by platform; {}: a device has no name by default."""
OPEN_SECONDS = 10.0
"""FFmpeg reads from a device before it is open: so long may one deliver nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureDevice:
    """A device. `form`, `device`: FFmpeg's names of its kind and of itself. `name`: what people call it."""

    form: str
    device: str
    name: str

    @property
    def ends(self) -> bool:
        """See LiveAudioInput: the stream goes on without it."""
        return False

    def check(self) -> None:
        """Open it and close it. Raises PlanError, also where nothing comes from it for OPEN_SECONDS."""
        try:
            time_limited(OPEN_SECONDS, self._open_and_close, "patchpar-device")
        except TimedOut:
            raise PlanError(f"{self}: nothing came from it for {OPEN_SECONDS:g} s") from None

    def _open_and_close(self) -> None:
        with self._opened():
            pass

    def audio(self) -> Iterator[tuple[Tensor, int]]:
        """Yield samples [channels, N] between -1 and 1, and their rate, as they come. Raises PlanError."""
        import av

        resampler = av.AudioResampler(format="fltp")
        for frame in self._frames("audio", "audio"):
            for part in resampler.resample(frame):
                yield torch.from_numpy(part.to_ndarray()), part.sample_rate

    def images(self) -> Iterator[Any]:
        """Yield its frames as PIL images as they come. Raises PlanError."""
        for frame in self._frames("video", "images"):
            check_pixels(frame.width, frame.height, f"a frame of {self.name}")
            yield frame.to_image()

    def _frames(self, kind: str, what: str) -> Iterator[Any]:
        """Decode its first track of a kind, without end. Raises PlanError; `what`: that it may lack."""
        import av

        with self._opened() as container:
            if not getattr(container.streams, kind):
                raise PlanError(f"{self.name} ({self}) has no {what}")
            try:
                yield from container.decode(**{kind: 0})
            except av.FFmpegError as error:
                raise PlanError(f"{self.name} has stopped: {error.strerror}") from error
        raise PlanError(f"{self.name} has stopped")

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        import av

        if not any(self.form in names.split(",") for names in av.formats_available):
            raise PlanError(f"this PyAV has no devices of the kind {self.form}")
        try:
            container: Any = av.open(self.device, format=self.form)
        except (av.FFmpegError, OSError) as error:
            raise PlanError(f"{self}: {error.strerror}") from error
        try:
            yield container
        finally:
            container.close()

    def __str__(self) -> str:
        return f"{self.form} {self.device}"


def microphone(device: str | None, platform: str = sys.platform) -> CaptureDevice:
    """Return the microphone of this name, by default the first that can be opened. Raises PlanError."""
    instead = "pipe the audio in: arecord -t wav -f S16_LE -r 16000 | patchpar stream --audio -"
    return _first("the microphone", "--audio mic", MICROPHONES.get(platform, ()), device, instead)


def camera(device: str | None, platform: str = sys.platform) -> CaptureDevice:
    """Return the camera of this name, by default the first that can be opened. Raises PlanError."""
    instead = "use the camera of a browser, with --input page"
    return _first("the camera", "--input camera", CAMERAS.get(platform, ()), device, instead)


def _first(name: str, flag: str, known: Sequence[tuple[str, str]], device: str | None, instead: str) -> CaptureDevice:
    reasons = []
    for form, default in known:
        if device is None and "{}" in default:
            reasons.append(f"{form} devices have no default")
            continue
        named = default if device is None else default.format(device) if "{}" in default else device
        found = CaptureDevice(form=form, device=named, name=name)
        try:
            found.check()
        except PlanError as error:
            reasons.append(str(error))
            continue
        return found
    tried = "; ".join(reasons) or "not known on this platform"
    raise PlanError(f"{flag}: {name} cannot be opened ({tried}): name another with {flag}:DEVICE, or {instead}")
