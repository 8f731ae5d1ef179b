"""Fragments of an MP4 file (ISO/IEC 14496-12, section 8.8) with one sample each."""

import re
import struct
from dataclasses import dataclass

ALONE, NEEDS_OTHERS = 0x02000000, 0x01010000
"""Sample flags, section 8.8.3: whether a sample can be decoded without another."""
TFHD = 0x020000 | 0x20 | 0x10 | 0x08
"""Flags of tfhd: offsets count from the fragment's beginning; flags, size and duration of the sample follow."""
TRUN = 0x01
"""Flag of trun: the offset of the data follows."""
START = re.compile(b"\x00\x00\x00?\x01")
"""Start code between NAL units (ITU-T H.264, annex B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mp4Sample:
    """A video frame or an audio packet. `is_key`: decodable on its own.

    `time`, `duration`: in units of its track, which are fractions of a second.
    """

    track: int
    time: int
    duration: int
    is_key: bool
    data: bytes


def fragment(number: int, sample: Mp4Sample) -> bytes:
    """Return the bytes of fragment `number`, with this sample."""
    flags = ALONE if sample.is_key else NEEDS_OTHERS
    header = _full(b"tfhd", 0, TFHD, struct.pack(">4I", sample.track, sample.duration, len(sample.data), flags))
    time = _full(b"tfdt", 1, 0, struct.pack(">Q", sample.time))

    def moof(offset: int) -> bytes:
        run = _full(b"trun", 0, TRUN, struct.pack(">2I", 1, offset))
        return _box(b"moof", _full(b"mfhd", 0, 0, struct.pack(">I", number)), _box(b"traf", header, time, run))

    return moof(len(moof(0)) + 8) + _box(b"mdat", sample.data)


def with_lengths(units: bytes) -> bytes:
    """Convert H.264 NAL units from annex B to the format of MP4: a length before each instead of a start code."""
    found = [unit.rstrip(b"\x00") for unit in START.split(units)]
    return b"".join(struct.pack(">I", len(unit)) + unit for unit in found if unit)


def _box(kind: bytes, *inside: bytes) -> bytes:
    data = b"".join(inside)
    return struct.pack(">I", 8 + len(data)) + kind + data


def _full(kind: bytes, version: int, flags: int, data: bytes) -> bytes:
    return _box(kind, struct.pack(">I", version << 24 | flags), data)
