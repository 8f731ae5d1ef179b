"""Audio from a pipe: WAV and raw samples of any size come out as they were written; other formats are refused."""

from __future__ import annotations

import io
import os
import struct
import wave
from collections.abc import Iterator
from itertools import islice
from typing import IO

import numpy as np
import pytest
import torch

from patchpar.errors import PlanError
from patchpar.media.pcm_pipe import EXTENSIBLE, PcmFormat, PcmPipe
from patchpar.stream.audio_track import AudioTrack
from tests.media.test_audio_file import tone
from tests.stream.tiny import AUDIO, FRAMES

RAW = PcmFormat(rate=16000)


def wav(body: bytes, tag: int = 1, channels: int = 1, rate: int = 16000, bits: int = 16, extra: bytes = b"") -> bytes:
    """A WAV as a pipe has it: without its sizes, and with a chunk that is none of ours."""
    size = channels * bits // 8
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * size, size, bits) + extra
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    return b"RIFF\xff\xff\xff\xffWAVE" + chunks + b"data\xff\xff\xff\xff" + body


def samples_of(file: IO[bytes], raw: PcmFormat = RAW) -> tuple[torch.Tensor, int]:
    pipe = PcmPipe.open(file, "the pipe", raw)
    pieces = list(pipe.audio())
    (rate,) = {rate for _, rate in pieces}
    return torch.cat([piece for piece, _ in pieces], 1), rate


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_whole_numbers(width: int) -> None:
    """As Python's own module writes it, in two channels that differ."""
    wanted = np.stack([tone(8000, 0.3), -tone(8000, 0.3) / 2])
    numbers = np.round(wanted.T * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    data = (
        (numbers + 128).astype("u1")
        if width == 1
        else np.ascontiguousarray(numbers, "<i8").view("u1").reshape(-1, 2, 8)
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(2)
        writer.setsampwidth(width)
        writer.setframerate(8000)
        writer.writeframes(data.tobytes() if width == 1 else data[:, :, :width].tobytes())
    file.seek(0)
    found, rate = samples_of(file)
    assert rate == 8000
    assert np.abs(found.numpy() - wanted).max() < 2.0 ** (2 - min(8 * width, 24))  # the precision of float32


@pytest.mark.parametrize("tag", [3, EXTENSIBLE])
def test_wav_of_floats(tag: int) -> None:
    wanted = tone(16000, 0.25).astype("<f4")
    extra = b"" if tag == 3 else struct.pack("<HHI", 22, 32, 4) + struct.pack("<H", 3) + bytes(14)
    found, _ = samples_of(io.BytesIO(wav(wanted.tobytes(), tag=tag, bits=32, extra=extra)))
    assert np.array_equal(found.numpy()[0], wanted)


def test_three_channels_at_7_khz_are_audio_of_a_stream() -> None:
    """As a file of that kind is: resampled, and its channels averaged."""
    numbers = np.round(np.stack([tone(7000, 1.0)] * 3).T * 32767).astype("<i2")
    pipe = PcmPipe.open(io.BytesIO(wav(numbers.tobytes(), channels=3, rate=7000)), "the pipe", RAW)
    assert str(pipe.format) == "s16le, 7000 samples/s, 3 channels"
    track = AudioTrack(AUDIO, FRAMES)
    for samples, rate in pipe.audio():
        track.push(samples, rate)
    track.end()
    heard = torch.cat([track.take(block)[1] for block in range(4)])
    wanted = torch.from_numpy(tone(AUDIO.rate, 0.7)).float()
    assert float((heard[200 : len(wanted)] - wanted[200 : len(heard)])[: len(heard) - 400].abs().mean()) < 0.03


class Trickle(io.BytesIO):
    """A pipe that gives so many bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read1(self, most: int | None = -1, /) -> bytes:
        assert most is not None
        return super().read1(min(most, self._size))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_raw_samples_do_not_depend_on_the_pieces(size: int) -> None:
    """A byte that is left over at the end is no sample."""
    numbers = np.arange(-1000, 1000, dtype="<i2")
    found, rate = samples_of(Trickle(numbers.tobytes() + b"x", size))
    assert rate == 16000
    assert np.array_equal(found.numpy()[0] * 32768, numbers)


def test_what_follows_the_samples_of_a_wav_is_no_audio() -> None:
    """Such as a title at the end of a file that is sent whole. Who does not know the size says so in many ways."""
    samples, title = np.full(1000, 16384, "<i2").tobytes(), b"LIST" + struct.pack("<I", 4) + b"name"
    for size, count in ((2000, 1000), (0, 1006), (0x7FFFFFFF - 36, 1006), (0x80000000, 1006), (0xFFFFFFFF, 1006)):
        data = wav(samples + title).replace(b"data\xff\xff\xff\xff", b"data" + struct.pack("<I", size))
        found, _ = samples_of(Trickle(data, 300))
        assert found.shape == (1, count), size
        assert bool((found[0, :1000] == 0.5).all())


def test_audio_is_there_before_the_writer_has_ended() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb", 0) as file, os.fdopen(write, "wb", 0) as writer:
        writer.write(np.full(160, 16384, "<i2").tobytes())
        pieces = PcmPipe.open(file, "the pipe", RAW).audio()
        first = list(islice(_samples(pieces), 160))
        assert first == [0.5] * 160
        writer.write(np.full(10, -16384, "<i2").tobytes())
        assert list(islice(_samples(pieces), 10)) == [-0.5] * 10


def _samples(pieces: Iterator[tuple[torch.Tensor, int]]) -> Iterator[float]:
    for samples, _ in pieces:
        yield from samples[0].tolist()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the pipe has ended without any audio"),
        (b"OggS and so on", "the pipe is Ogg: it has to be WAV or raw samples, such as by ffmpeg -i FILE -f wav -"),
        (b"RIFF\0\0\0\0AVI ", "is RIFF, but no WAV"),
        (wav(b"")[:30], "has ended within the header of its WAV"),
        (wav(b"", tag=85), "WAV with format tag 85 and 16 bits: integers of 8, 16, 24 or 32 bits and floats of 32"),
        (wav(b"", channels=9), "the pipe: audio of 9 channels: 1 to 8 are understood"),
        (wav(b"", rate=500), "the pipe: audio at 500 samples per second: 1000 to 384000 are understood"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "WAV without a format: its chunk 'fmt ' is missing"),
        (b"RIFF\0\0\0\0WAVELIST\xff\xff\xff\xff", "broken WAV: the chunk b'LIST' has 4294967295 bytes"),
        (b"RIFF\0\0\0\0WAVEfmt \4\0\0\0abcd", "broken WAV: its format has 4 bytes"),
    ],
)
def test_what_is_no_audio_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        PcmPipe.open(io.BytesIO(data), "the pipe", RAW)
    assert message in str(raised.value)


def test_formats_that_cannot_be() -> None:
    for arguments, message in (
        ({"rate": 0}, "audio at 0 samples"),
        ({"rate": 16000, "channels": 0}, "audio of 0 channels"),
        ({"rate": 16000, "form": "f64le"}, "samples as 'f64le': use one of u8, s16le"),
    ):
        with pytest.raises(PlanError, match=message):
            PcmFormat(**arguments)  # type: ignore[arg-type]
