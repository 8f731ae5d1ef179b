"""A video in fragments of MP4, each of which a browser can play when it has the head.

FFmpeg's own writer of fragments holds frames back until others have come, and times them by those; ours needs no other.
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
    """What a player needs before the first fragment, and what sort of video it is, as HTML names it."""

    mime: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mp4Fragment:
    """One frame, or a bit of audio. `is_key`: a frame that needs no other, so that one can begin with it."""

    data: bytes
    is_key: bool


class FragmentEncoder:
    """Encodes a stream block by block, in H.264 and AAC. Raises PlanError for sides that are odd."""

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
        """These frames and their audio, in the order of time. See VideoEncoder.add."""
        return list(self._fragments(self._encoder.add(frames_FHWC, pts, audio_N)))

    def close(self) -> list[Mp4Fragment]:
        """What is left."""
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
    """As the head counts the time of this track."""
    return round(value * packet.time_base / packet.stream.time_base)


def _head_of(data: bytes, *, has_audio: bool) -> Mp4Header:
    offset = data.index(b"avcC") + 5  # profile and level, as RFC 6381 wants them
    codecs = [f"avc1.{data[offset : offset + 3].hex()}", *(["mp4a.40.2"] if has_audio else [])]
    return Mp4Header(mime=f'video/mp4; codecs="{", ".join(codecs)}"', data=data)
