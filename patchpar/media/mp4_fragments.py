"""Encoding of a stream to fragmented MP4, which a browser plays fragment by fragment after the header.

A fragment (ISO/IEC 14496-12, section 8.8) has one sample: a video frame or an audio packet. FFmpeg's own muxer holds a
frame back until the next has come, to know its duration; here a frame is written at once.
"""

import io
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patchpar.media.video_encoder import VideoEncoder, VideoFormat

EMPTY = {"movflags": "empty_moov+default_base_moof"}
QUICK = {"preset": "veryfast", "tune": "zerolatency", "forced-idr": "1", "profile": "high", "crf": "20"}
ALONE, NEEDS_OTHERS = 0x02000000, 0x01010000
"""Sample flags, section 8.8.3: whether a sample can be decoded without another."""
TFHD = 0x020000 | 0x20 | 0x10 | 0x08
"""Flags of tfhd: offsets count from the fragment's beginning; flags, size and duration of the sample follow."""
TRUN = 0x01
"""Flag of trun: the offset of the data follows."""
START = re.compile(b"\x00\x00\x00?\x01")
"""Start code between NAL units (ITU-T H.264, annex B)."""


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


class FragmentEncoder(VideoEncoder):
    """Encodes a stream of `height` x `width` pixels block by block, in H.264 and AAC. Raises PlanError for odd sizes.

    `rate`: samples per second of its audio; None for no audio.
    """

    def __init__(self, fps: float, height: int, width: int, rate: int | None) -> None:
        target = io.BytesIO()
        form = VideoFormat(fps=fps, height=height, width=width, rate=rate, options=QUICK, muxing=EMPTY, is_live=True)
        super().__init__(target, form)
        self._container.start_encoding()
        self.head = _head_of(target.getvalue(), has_audio=rate is not None)
        self._count = 0

    def add(self, frames_FHWC: Tensor, pts: float, audio_N: Tensor | None) -> list[Mp4Fragment]:
        """Encode frames and their audio to fragments, in the order of time. See VideoEncoder.packets."""
        return list(self._fragments(self.packets(frames_FHWC, pts, audio_N)))

    def close(self) -> list[Mp4Fragment]:
        found = list(self._fragments(self.rest()))
        self._container.close()
        return found

    def _fragments(self, packets: Iterable[Any]) -> Iterator[Mp4Fragment]:
        for packet in sorted(packets, key=lambda packet: packet.pts * packet.time_base):
            self._count += 1
            is_image = packet.stream.type == "video"
            data = fragment(
                self._count,
                with_lengths(bytes(packet)) if is_image else bytes(packet),
                track=packet.stream.index + 1,
                time=_in_units(packet.pts, packet),
                duration=_in_units(packet.duration, packet),
                is_key=packet.is_keyframe or not is_image,
            )
            yield Mp4Fragment(data=data, is_key=is_image and packet.is_keyframe)


def _in_units(value: int, packet: Any) -> int:
    """A time in the units that the header states for this track."""
    return round(value * packet.time_base / packet.stream.time_base)


def _head_of(data: bytes, *, has_audio: bool) -> Mp4Header:
    offset = data.index(b"avcC") + 5  # profile and level, see RFC 6381
    codecs = [f"avc1.{data[offset : offset + 3].hex()}", *(["mp4a.40.2"] if has_audio else [])]
    return Mp4Header(mime=f'video/mp4; codecs="{", ".join(codecs)}"', data=data)


def fragment(number: int, sample: bytes, *, track: int, time: int, duration: int, is_key: bool) -> bytes:
    """Return the bytes of fragment `number`, with this sample. `is_key`: decodable on its own.

    `time`, `duration`: in units of its track, which are fractions of a second.
    """
    flags = ALONE if is_key else NEEDS_OTHERS
    header = _full(b"tfhd", 0, TFHD, struct.pack(">4I", track, duration, len(sample), flags))
    begin = _full(b"tfdt", 1, 0, struct.pack(">Q", time))

    def moof(offset: int) -> bytes:
        run = _full(b"trun", 0, TRUN, struct.pack(">2I", 1, offset))
        return _box(b"moof", _full(b"mfhd", 0, 0, struct.pack(">I", number)), _box(b"traf", header, begin, run))

    return moof(len(moof(0)) + 8) + _box(b"mdat", sample)


def with_lengths(units: bytes) -> bytes:
    """Convert H.264 NAL units from annex B to the format of MP4: a length before each instead of a start code."""
    found = [unit.rstrip(b"\x00") for unit in START.split(units)]
    return b"".join(struct.pack(">I", len(unit)) + unit for unit in found if unit)


def _box(kind: bytes, *inside: bytes) -> bytes:
    data = b"".join(inside)
    return struct.pack(">I", 8 + len(data)) + kind + data


def _full(kind: bytes, version: int, flags: int, data: bytes) -> bytes:
    return _box(kind, struct.pack(">I", version << 24 | flags), data)
