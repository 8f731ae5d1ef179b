"""Encoding of a stream to fragmented MP4, which a browser plays fragment by fragment after the header.

FFmpeg's own muxer holds a frame back until the next has come, to know its duration; here a frame is written at once.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patchpar.stream.web.mp4_boxes import Mp4Sample, fragment, with_lengths
from patchpar.stream.web.video_encoder import VideoEncoder, VideoFormat

EMPTY = {"movflags": "empty_moov+default_base_moof"}
QUICK = {"preset": "veryfast", "tune": "zerolatency", "forced-idr": "1", "profile": "high", "crf": "20"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mp4Header:
    """The bytes that a player needs before the first fragment, and the MIME type with codecs."""

    mime: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mp4Fragment:
    """One video frame, or one audio packet. `is_key`: a key frame, with which playback can begin."""

    data: bytes
    is_key: bool


class FragmentEncoder:
    """Encodes a stream of `height` x `width` pixels block by block, in H.264 and AAC. Raises PlanError for odd sizes.

    `rate`: samples per second of its audio; None for no audio.
    """

    def __init__(self, fps: float, height: int, width: int, rate: int | None) -> None:
        import av

        form = VideoFormat(fps=fps, height=height, width=width, rate=rate, options=QUICK, is_live=True)
        target = io.BytesIO()
        self._container: Any = av.open(target, "w", format="mp4", options=EMPTY)
        self._encoder = VideoEncoder(self._container, form)
        self._container.start_encoding()
        self.head = _head_of(target.getvalue(), has_audio=rate is not None)
        self._count = 0

    def add(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> list[Mp4Fragment]:
        """Encode frames and their audio to fragments, in the order of time. See VideoEncoder.add."""
        return list(self._fragments(self._encoder.add(frames_FHWC, pts, audio_N)))

    def close(self) -> list[Mp4Fragment]:
        """Return the remaining fragments."""
        found = list(self._fragments(self._encoder.rest()))
        self._container.close()
        return found

    def _fragments(self, packets: Iterable[Any]) -> Iterator[Mp4Fragment]:
        for packet in sorted(packets, key=lambda packet: packet.pts * packet.time_base):
            self._count += 1
            is_image = packet.stream.type == "video"
            sample = Mp4Sample(
                track=packet.stream.index + 1,
                time=_in_units(packet.pts, packet),
                duration=_in_units(packet.duration, packet),
                is_key=packet.is_keyframe or not is_image,
                data=with_lengths(bytes(packet)) if is_image else bytes(packet),
            )
            yield Mp4Fragment(data=fragment(self._count, sample), is_key=is_image and sample.is_key)


def _in_units(value: int, packet: Any) -> int:
    """A time in the units that the header states for this track."""
    return round(value * packet.time_base / packet.stream.time_base)


def _head_of(data: bytes, *, has_audio: bool) -> Mp4Header:
    offset = data.index(b"avcC") + 5  # profile and level, see RFC 6381
    codecs = [f"avc1.{data[offset : offset + 3].hex()}", *(["mp4a.40.2"] if has_audio else [])]
    return Mp4Header(mime=f'video/mp4; codecs="{", ".join(codecs)}"', data=data)
