"""`PcmPipe`: live audio from a pipe, as WAV (RIFF; Microsoft's multimedia specification of 1991) or as raw samples."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole

SampleFormat = Literal["u8", "s16le", "s24le", "s32le", "f32le"]
BITS = {"u8": 8, "s16le": 16, "s24le": 24, "s32le": 32, "f32le": 32}
NUMBERS = {"u8": ("u1", 2**7), "s16le": ("<i2", 2**15), "f32le": ("<f4", 1)}
"""How numpy reads samples, and their full scale; others are or become 32 bits."""
OTHERS = {b"OggS": "Ogg", b"fLaC": "FLAC", b"ID3\x03": "MP3", b"ID3\x04": "MP3", b"RIFX": "RIFX"}
OTHERS |= {b"\x1aE\xdf\xa3": "Matroska"}
"""Formats that are no samples, by their first bytes."""
INTEGERS, FLOATS, EXTENSIBLE = 1, 3, 0xFFFE
"""Format tags of WAV."""
FIELDS = struct.Struct("<HHI6xH")
"""Tag, channels, rate and bits in the format of WAV."""
PIECE_SECONDS = 0.1
"""At most so much is read at once; less if less has come."""
MAX_CHANNELS, RATES = 8, (1000, 384_000)
UNKNOWN = 0x7FFF0000
"""Bytes of samples from which on a size is that of a writer that does not know it, as arecord, sox and ffmpeg have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PcmFormat:
    """Raw audio: `rate` samples per second of each of `channels`, one after another. Raises PlanError."""

    rate: int
    channels: int = 1
    form: SampleFormat = "s16le"

    def __post_init__(self) -> None:
        if not is_whole(self.rate, *RATES):
            raise PlanError(f"audio at {self.rate} samples per second: {RATES[0]} to {RATES[1]} are understood")
        if not is_whole(self.channels, 1, MAX_CHANNELS):
            raise PlanError(f"audio of {self.channels} channels: 1 to {MAX_CHANNELS} are understood")
        if self.form not in get_args(SampleFormat):
            raise PlanError(f"samples as {self.form!r}: use one of {', '.join(get_args(SampleFormat))}")

    @property
    def size(self) -> int:
        """Bytes of one sample of all channels."""
        return BITS[self.form] // 8 * self.channels

    def samples(self, data: bytes) -> Tensor:
        """Convert whole samples to [channels, N] between -1 and 1."""
        if self.form == "s24le":  # as the upper bytes of 32 bits, which keep the sign
            wide = np.zeros((len(data) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(data, "u1").reshape(-1, 3)
            data = wide.tobytes()
        kind, scale = NUMBERS.get(self.form, ("<i4", 2**31))
        values = np.frombuffer(data, kind).astype(np.float32) / scale - (self.form == "u8")
        return torch.from_numpy(np.ascontiguousarray(values.reshape(-1, self.channels).T))

    def __str__(self) -> str:
        return f"{self.form}, {self.rate} samples/s, {self.channels} channel{'s' if self.channels != 1 else ''}"


class PcmPipe:
    """Audio of an open file without an end. `name`: for messages. The stream ends with it, see LiveAudioInput."""

    ends = True

    def __init__(self, file: IO[bytes], name: str, form: PcmFormat, begun: bytes = b"", size: float = math.inf) -> None:
        self._file, self.name, self.format, self._begun, self._size = file, name, form, begun, size

    @classmethod
    def open(cls, file: IO[bytes], name: str, raw: PcmFormat) -> "PcmPipe":
        """Read the header, if it is WAV; otherwise samples are as in `raw`. Waits for the first bytes.

        Raises PlanError for another format, for WAV that is not of plain samples, and where nothing comes.
        """
        begun = _read(file, 4)
        if not begun:
            raise PlanError(f"{name} has ended without any audio")
        if begun in OTHERS:
            raise PlanError(
                f"{name} is {OTHERS[begun]}: it has to be WAV or raw samples, such as by ffmpeg -i FILE -f wav -"
            )
        if begun == b"RIFF":
            form, size = _read_header(file, name)
            return cls(file, name, form, size=size)
        return cls(file, name, raw, begun)

    def audio(self) -> Iterator[tuple[Tensor, int]]:
        """See LiveAudioInput. What is no whole sample at the end is left out, and what follows WAV's samples."""
        form, rest, left = self.format, self._begun, self._size
        most = max(1, round(form.rate * PIECE_SECONDS)) * form.size
        while data := _read_some(self._file, int(min(most, left))):
            rest, left = rest + data, left - len(data)
            whole = len(rest) - len(rest) % form.size
            if whole:
                yield form.samples(rest[:whole]), form.rate
            rest = rest[whole:]


def _read_header(file: IO[bytes], name: str) -> tuple[PcmFormat, float]:
    """Read until the first sample; return also how many bytes of samples follow, without end where nobody knows.

    A writer to a pipe does not, and says 0 or UNKNOWN and more.
    """
    if _exactly(file, 8, name)[4:] != b"WAVE":
        raise PlanError(f"{name} is RIFF, but no WAV: send WAV or raw samples")
    form: PcmFormat | None = None
    while True:
        kind, size = struct.unpack("<4sI", _exactly(file, 8, name))
        if kind == b"data":
            if form is None:
                raise PlanError(f"{name} is WAV without a format: its chunk 'fmt ' is missing")
            return form, size if 0 < size < UNKNOWN else math.inf
        if size > 1 << 20:
            raise PlanError(f"{name} is broken WAV: the chunk {kind!r} has {size} bytes")
        body = _exactly(file, size + size % 2, name)
        if kind == b"fmt ":
            form = _format_of(body, name)


def _format_of(body: bytes, name: str) -> PcmFormat:
    if len(body) < 16:
        raise PlanError(f"{name} is broken WAV: its format has {len(body)} bytes")
    tag, channels, rate, bits = FIELDS.unpack_from(body)
    if tag == EXTENSIBLE and len(body) >= 26:
        tag = int.from_bytes(body[24:26], "little")
    known: dict[tuple[int, int], Any] = {(INTEGERS, 8): "u8", (FLOATS, 32): "f32le"}
    known |= {(INTEGERS, each): f"s{each}le" for each in (16, 24, 32)}
    if (tag, bits) not in known:
        raise PlanError(
            f"{name} is WAV with format tag {tag} and {bits} bits: integers of 8, 16, 24 or 32 bits and floats of 32 "
            "bits are understood"
        )
    try:
        return PcmFormat(rate=rate, channels=channels, form=known[tag, bits])
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None


def _exactly(file: IO[bytes], count: int, name: str) -> bytes:
    data = _read(file, count)
    if len(data) < count:
        raise PlanError(f"{name} has ended within the header of its WAV")
    return data


def _read(file: IO[bytes], count: int) -> bytes:
    """Read `count` bytes, or those until the end."""
    data = b""
    while len(data) < count and (more := _read_some(file, count - len(data))):
        data += more
    return data


def _read_some(file: IO[bytes], most: int) -> bytes:
    """Read what has come, at most so much; empty at the end. A buffered file would wait for all of it."""
    read = getattr(file, "read1", file.read)
    return bytes(read(most) or b"") if most else b""
