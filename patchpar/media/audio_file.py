"""Reading audio files, and the audio of videos, with PyAV: one channel, at the sampling rate of the model.

A file is decoded when it is opened, to find what is wrong with it, and again piece by piece when it is played: an hour
of samples is never in memory at once.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.media_file import open_media

GUESSED = ("mp3", "aac", "ac3", "mpeg", "mpegts")
MISSING = 0.25
"""Seconds that the audio may be shorter than the file declares: encoders round up."""
GAP = 0.05
"""Seconds between two decoded frames above which samples are missing; less is rounding."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFile:
    """A file, or the bytes of one, that has been decoded once, so that it can be again.

    `name`: for messages. `rate`: samples per second. `facts`: codec, channels and length as text.
    """

    source: Path | bytes = field(repr=False)
    name: str
    rate: int
    facts: str

    def pieces(self) -> Iterator[Tensor]:
        """Yield its mono samples [N] between -1 and 1, one after another. Raises PlanError."""
        return _pieces(self.source, self.name, self.rate, math.inf)

    @property
    def samples(self) -> Tensor:
        """All its samples [N]. Raises PlanError."""
        return torch.cat(list(self.pieces()))


def read_audio(source: Path | bytes, rate: int, *, most: float = math.inf, name: str = "") -> AudioFile:
    """Open the first audio track of a file, or of the bytes of one, at `rate` samples per second.

    `name`: for messages, by default the path. Raises PlanError, which names the file's format, if unreadable, empty, or
    longer than `most` seconds: no more than these are decoded, since a small file can hold days of silence.
    """
    name = name or str(source)
    if isinstance(source, Path) and not source.is_file():
        raise PlanError(f"{name}: there is no such audio file")
    with _opened(source, name) as container:
        facts, declared = _facts(container.streams.audio[0]), _declared(container)
    count = sum(map(len, _pieces(source, f"{name} ({facts})", rate, most)))
    if not count:
        raise PlanError(f"{name} ({facts}) holds no samples")
    if declared - count / rate > MISSING:
        raise PlanError(
            f"{name} ({facts}) ends after {count / rate:.1f} s of {declared:.1f} s: repair it, or cut it there"
        )
    return AudioFile(source=source, name=f"{name} ({facts})", rate=rate, facts=f"{facts}, {count / rate:.1f} s")


@contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[Any]:
    """The PyAV container of a file with audio. Raises PlanError, also while it is open."""
    import av

    try:
        with open_media(source if isinstance(source, Path) else io.BytesIO(source)) as container:
            if not container.streams.audio:
                raise PlanError(f"{name} has no audio: {container.format.name}, {len(container.streams)} other tracks")
            yield container
    except av.FFmpegError as error:
        raise PlanError(f"{name} cannot be read as audio: {error.strerror}; use .wav or .mp3, for example") from error


def _pieces(source: Path | bytes, name: str, rate: int, most: float) -> Iterator[Tensor]:
    import av

    due: float | None = None  # when the next samples should begin
    seconds = 0.0
    with _opened(source, name) as container:
        container.streams.audio[0].codec_context.options = {"err_detect": "crccheck+explode"}
        try:
            for _, frames in groupby(container.decode(audio=0), _form_of):
                resampler = av.AudioResampler(format="fltp", rate=rate)  # which takes frames of one form only
                for frame in frames:
                    if due is not None and (frame.time is None or abs(frame.time - due) > GAP):  # None: it was lost
                        where = f"after {due:.1f} s: samples are missing"
                        raise PlanError(f"{name} is broken {where}. Repair it, or cut it there")
                    due = None if frame.time is None else frame.time + frame.samples / frame.sample_rate
                    seconds += frame.samples / frame.sample_rate
                    if seconds > most + ROUNDING:
                        raise PlanError(f"{name} is longer than {most:g} s: cut it there")
                    for made in resampler.resample(frame):
                        yield _mono(made)
                for made in resampler.resample(None):
                    yield _mono(made)
        except av.FFmpegError as error:
            where = f"after {seconds:.1f} s: {error.strerror}"
            raise PlanError(f"{name} is broken {where}. Repair it, or cut it there") from error


def _mono(frame: Any) -> Tensor:
    return torch.from_numpy(frame.to_ndarray().mean(0))


def _form_of(frame: Any) -> tuple[str, str, int]:
    """What can change within a file, as where several were put one behind another."""
    return frame.format.name, frame.layout.name, frame.sample_rate


def _declared(container: Any) -> float:
    """Seconds that the file declares; 0 for formats without a length, which FFmpeg estimates from the file size."""
    stream = container.streams.audio[0]
    if container.format.name in GUESSED or stream.duration is None:
        return 0.0
    return float(stream.duration * stream.time_base)


def _facts(stream: Any) -> str:
    codec = stream.codec_context
    channels = codec.layout.nb_channels
    return f"{codec.name}, {codec.sample_rate} samples/s, {channels} channel{'s' if channels != 1 else ''}"
