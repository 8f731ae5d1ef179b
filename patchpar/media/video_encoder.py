"""Encoding of a stream's frames and audio with PyAV, block by block: to a file, or for browsers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import IO, Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from patchpar.errors import PlanError
from patchpar.media.resample import Resampler

AUDIO_RATE = 48_000
"""Samples per second that both audio codecs support."""

PRIMING = 1024
"""Samples that an AAC encoder adds before the audio. Fragments cannot tell a player to skip them."""

KEY_SECONDS = 0.4
"""Minimum of seconds between two key frames of a live video, since these are large."""

TOLERANCE = 0.005
"""Seconds between two blocks of audio that are rounding, not a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFormat:
    """How a video is encoded; sizes in pixels. `rate`: samples per second of its audio or None. Raises PlanError.

    `container`, `video`, `audio`: FFmpeg's names. `options`: those of the video encoder. `muxing`: of the container.
    `is_live`: no timestamp is below 0, and blocks begin with a key frame, at most one per KEY_SECONDS.
    """

    fps: float
    height: int
    width: int
    rate: int | None = None
    container: str = "mp4"
    video: str = "libx264"
    audio: str = "aac"
    options: dict[str, str] = field(default_factory=dict)
    is_live: bool = False
    muxing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.height % 2 or self.width % 2:
            raise PlanError(f"frames are {self.height} x {self.width}: video needs an even height and width")


class VideoEncoder:
    """Encodes frames and audio to packets, for the two tracks of `target`, a path or a file. Raises PlanError."""

    def __init__(self, target: str | IO[bytes], form: VideoFormat) -> None:
        import av

        self._form = form
        self._container: Any = av.open(target, "w", format=form.container, options=form.muxing)
        self._fps = Fraction(form.fps).limit_denominator(10_000)
        try:
            self._video: Any = self._container.add_stream(form.video, rate=self._fps, options=form.options)
        except av.FFmpegError as error:
            raise PlanError(f"this PyAV cannot encode {form.video}: {error}") from error
        self._video.width, self._video.height, self._video.pix_fmt = form.width, form.height, "yuv420p"
        self._audio: Any = None
        if form.rate is not None:
            self._audio = self._container.add_stream(form.audio, rate=AUDIO_RATE, layout="mono")
            self._resampler = Resampler(form.rate, AUDIO_RATE)
        self._received = self._written = 0
        self._last_key: int | None = None

    def packets(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None = None) -> Iterator[Any]:
        """Yield the packets of frames in uint8, the first at `pts` seconds, and of their audio between -1 and 1."""
        import av

        first = round(pts * self._form.fps)
        for number, image in enumerate(frames_FHWC.numpy()):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = first + number, 1 / self._fps
            if number == 0 and self._begins_anew(first):
                frame.pict_type = av.video.frame.PictureType.I
            yield from self._timed(self._video.encode(frame))
        if self._audio is not None and audio_N is not None:
            yield from self._encoded(audio_N, round(pts * self._resampler.rate))

    def rest(self) -> Iterator[Any]:
        """Yield the packets that the encoders still hold."""
        yield from self._timed(self._video.encode())
        if self._audio is not None:
            yield from self._audio.encode()

    def _begins_anew(self, frame: int) -> bool:
        """Whether this first frame of a block becomes a key frame."""
        if not self._form.is_live:
            return False
        if self._last_key is not None and frame - self._last_key < KEY_SECONDS * self._form.fps:
            return False
        self._last_key = frame
        return True

    def _timed(self, packets: list[Any]) -> Iterator[Any]:
        for packet in packets:
            packet.duration = round(1 / self._fps / packet.time_base)  # encoders leave it open
            yield packet

    def _encoded(self, audio_N: Tensor, at: int) -> Iterator[Any]:
        """Packets of audio. Dropped frames become silence, since an encoder takes no gaps.

        Timestamps are sample counts, to avoid rounding twice. Live, the first samples are dropped for PRIMING.
        """
        import av

        lost = at - self._received if at - self._received > self._resampler.rate * TOLERANCE else 0
        samples = functional.pad(audio_N.float(), (lost, 0))
        self._received += len(samples)
        ready = self._resampler.push(samples)
        first, self._written = self._written, self._written + len(ready)
        ready = ready[max(0, PRIMING - first) if self._form.is_live else 0 :].contiguous()
        if len(ready):
            frame = av.AudioFrame.from_ndarray(ready.numpy()[None], format="fltp", layout="mono")
            frame.sample_rate, frame.time_base = AUDIO_RATE, Fraction(1, AUDIO_RATE)
            frame.pts = self._written - len(ready)
            yield from self._audio.encode(frame)


class VideoWriter(VideoEncoder):
    """Writes a video. Dropped frames leave a gap of their length."""

    def add(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None = None) -> None:
        """Encode frames and audio, see VideoEncoder.packets."""
        for packet in self.packets(frames_FHWC, pts, audio_N):
            self._container.mux(packet)

    def close(self) -> None:
        for packet in self.rest():
            self._container.mux(packet)
        self._container.close()
