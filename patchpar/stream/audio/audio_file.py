"""Reading audio files, and the audio of videos, with PyAV: one channel, at the sampling rate of the model."""

import math
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.stream.media_file import open_media

GUESSED = ("mp3", "aac", "ac3", "mpeg", "mpegts")
MISSING = 0.25
"""Seconds that the audio may be shorter than the file declares: encoders round up."""
GAP = 0.05
"""Seconds between two decoded frames above which samples are missing; less is rounding."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFile:
    """Mono samples [N] at `rate` samples per second. `facts`: codec, channels and length as text."""

    samples: Tensor
    rate: int
    facts: str


def read_audio(path: Path, rate: int, *, most: float = math.inf) -> AudioFile:
    """Read the whole first audio track, at `rate` samples per second.

    Raises PlanError, which names the file's format, if unreadable, empty, or longer than `most` seconds: no more than
    these are decoded, since a small file can hold days of silence.
    """
    if not path.is_file():
        raise PlanError(f"{path}: there is no such audio file")
    import av

    try:
        with open_media(path) as container:
            if not container.streams.audio:
                raise PlanError(f"{path} has no audio: {container.format.name}, {len(container.streams)} other tracks")
            facts = _facts(container.streams.audio[0])
            declared = _declared(container)
            samples = _decoded(container, rate, f"{path} ({facts})", most)
    except av.FFmpegError as error:
        raise PlanError(f"{path} cannot be read as audio: {error.strerror}; use .wav or .mp3, for example") from error
    if not len(samples):
        raise PlanError(f"{path} ({facts}) holds no samples")
    if declared - len(samples) / rate > MISSING:
        raise PlanError(
            f"{path} ({facts}) ends after {len(samples) / rate:.1f} s of {declared:.1f} s: repair it, or cut it there"
        )
    return AudioFile(samples=samples, rate=rate, facts=f"{facts}, {len(samples) / rate:.1f} s")


def _decoded(container: Any, rate: int, name: str, most: float) -> Tensor:
    import av

    container.streams.audio[0].codec_context.options = {"err_detect": "crccheck+explode"}
    pieces: list[Any] = []
    due: float | None = None  # when the next samples should begin
    seconds = 0.0
    try:
        for _, frames in groupby(container.decode(audio=0), _form_of):
            resampler = av.AudioResampler(format="fltp", rate=rate)  # which takes frames of one form only
            for frame in frames:
                if due is not None and (frame.time is None or abs(frame.time - due) > GAP):  # None: the decoder lost it
                    where = f"after {due:.1f} s: samples are missing"
                    raise PlanError(f"{name} is broken {where}. Repair it, or cut it there")
                due = None if frame.time is None else frame.time + frame.samples / frame.sample_rate
                pieces += [made.to_ndarray().mean(0) for made in resampler.resample(frame)]
                seconds += frame.samples / frame.sample_rate
                if seconds > most + ROUNDING:
                    raise PlanError(f"{name} is longer than {most:g} s: cut it there")
            pieces += [made.to_ndarray().mean(0) for made in resampler.resample(None)]
    except av.FFmpegError as error:
        where = f"after {sum(map(len, pieces)) / rate:.1f} s: {error.strerror}"
        raise PlanError(f"{name} is broken {where}. Repair it, or cut it there") from error
    return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.zeros(0)


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
