"""Sound files: any rate and any channels become what a model hears; what cannot be is refused with the file's facts."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from patchpar.errors import PlanError
from patchpar.media.audio_file import read_audio


def tone(rate: int, seconds: float, hertz: float = 220.0) -> np.ndarray:
    return np.sin(2 * math.pi * hertz * np.arange(round(rate * seconds)) / rate) * 0.5


def write_wav(path: Path, samples: np.ndarray, rate: int, channels: int = 1) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.repeat(samples, channels) * 32767).astype("<i2").tobytes())
    return path


@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (44100, 2), (7000, 3)])
def test_any_rate_and_channels(rate: int, channels: int, tmp_path: Path) -> None:
    found = read_audio(write_wav(tmp_path / "a.wav", tone(rate, 1.0), rate, channels), 16000)
    assert found.rate == 16000
    assert abs(len(found.samples) - 16000) < 40
    wanted = tone(16000, 1.0)[: len(found.samples)]
    assert np.abs(found.samples.numpy()[100:15900] - wanted[100:15900]).mean() < 0.02
    plural = "s" if channels > 1 else ""
    assert found.facts == f"pcm_s16le, {rate} samples/s, {channels} channel{plural}, {len(found.samples) / 16000:.1f} s"


def test_files_without_audio(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none.wav: there is no such audio file"):
        read_audio(tmp_path / "none.wav", 16000)
    (tmp_path / "text.wav").write_text("no sound at all")
    with pytest.raises(PlanError, match=r"text.wav cannot be read as audio: Invalid data .*; use \.wav or \.mp3"):
        read_audio(tmp_path / "text.wav", 16000)
    with pytest.raises(PlanError, match=r"pcm_s16le, 8000 samples/s, 1 channel\) holds no samples"):
        read_audio(write_wav(tmp_path / "empty.wav", tone(8000, 0), 8000), 16000)
    with av.open(str(tmp_path / "mute.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        container.mux(stream.encode())
    with pytest.raises(PlanError, match=r"mute.mp4 has no audio"):
        read_audio(tmp_path / "mute.mp4", 16000)


def test_a_file_is_played_in_pieces(tmp_path: Path) -> None:
    """Of a file or of its bytes; also after others have begun to play it."""
    path = write_wav(tmp_path / "a.wav", tone(44100, 3.0), 44100)
    found, of_bytes = read_audio(path, 16000), read_audio(path.read_bytes(), 16000, name="an upload")
    begun = found.pieces()
    next(begun)
    pieces = list(of_bytes.pieces())
    assert max(map(len, pieces)) < 16000 / 4
    assert torch.equal(torch.cat(pieces), found.samples)
    assert found.facts == of_bytes.facts
    path.write_bytes(b"no sound any more")
    with pytest.raises(PlanError, match=r"a.wav \(pcm_s16le, .* cannot be read as audio"):
        next(found.pieces())
    with pytest.raises(PlanError, match=r"^an upload cannot be read as audio"):
        read_audio(b"none", 16000, name="an upload")


def test_no_more_is_decoded_than_may_be_there(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "long.wav", tone(8000, 1.0), 8000)
    assert len(read_audio(path, 8000, most=1.0).samples) == 8000
    with pytest.raises(PlanError, match=r"long.wav .* is longer than 0.5 s: cut it there"):
        read_audio(path, 8000, most=0.5)


def write_flac(path: Path, codec: str = "flac") -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16000, layout="mono")
        samples = (tone(16000, 3.0) * 32767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_a_file_that_is_broken_says_where(tmp_path: Path) -> None:
    """What comes before would be sound, but nothing is guessed."""
    path = write_flac(tmp_path / "a.flac")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4000] = bytes(4000)
    path.write_bytes(data)
    with pytest.raises(PlanError, match=r"a.flac \(flac, 16000 samples/s, 1 channel\) is broken after [012]\.\d s"):
        read_audio(path, 16000)


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    path = write_flac(tmp_path / "a.flac")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(PlanError, match=r"(ends|is broken) after [012]\.\d s"):
        read_audio(path, 16000)
    path = write_flac(tmp_path / "a.mka", "pcm_s16le")
    assert read_audio(path, 16000).facts.endswith("3.0 s")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(PlanError, match=r"a.mka cannot be read as audio: it was cut off, and has \d+ of \d+ bytes"):
        read_audio(path, 16000)


@pytest.mark.parametrize("size", [None, 0, 0x7FFFFFFF, 2**32 - 1], ids=str)
def test_a_wav_file_that_was_cut_off(size: int | None, tmp_path: Path) -> None:
    """Unless its writer did not know how long it would be, as one that writes to a pipe."""
    path = write_wav(tmp_path / "a.wav", tone(16000, 3.0), 16000)
    data = bytearray(path.read_bytes()[: path.stat().st_size // 2])
    if size is not None:
        data[4:8] = size.to_bytes(4, "little")
        data[40:44] = size.to_bytes(4, "little")
    path.write_bytes(data)
    if size is None:
        with pytest.raises(PlanError, match=r"a.wav cannot be read as audio: it was cut off, and has \d+ of \d+ bytes"):
            read_audio(path, 16000)
    else:
        assert read_audio(path, 16000).facts.endswith("1.5 s")


@pytest.mark.parametrize(("rate", "layout"), [(22050, "mono"), (44100, "stereo")])
def test_files_put_one_behind_another(rate: int, layout: str, tmp_path: Path) -> None:
    """Of another rate, or with more channels, as ADTS and MP3 allow it: heard as one."""
    parts = [adts(tmp_path / "1.aac", 44100, "mono", 220.0), adts(tmp_path / "2.aac", rate, layout, 440.0)]
    path = tmp_path / "a.aac"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    samples = read_audio(path, 16000).samples.numpy()
    assert len(samples) == pytest.approx(32000, abs=2200)  # encoders round up
    for first, hertz in ((2000, 220), (18000, 440)):
        crossings = np.abs(np.diff(np.sign(samples[first : first + 8000]))).sum() / 2
        assert crossings == pytest.approx(hertz, abs=5)  # twice per period, in half a second


def adts(path: Path, rate: int, layout: str, hertz: float) -> Path:
    with av.open(str(path), "w", format="adts") as container:
        stream = container.add_stream("aac", rate=rate, layout=layout)
        samples = np.stack([tone(rate, 1.0, hertz)] * (1 + (layout == "stereo"))).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_a_playlist_is_no_file_of_audio(tmp_path: Path) -> None:
    """FFmpeg would open the files that it names. The control: it does, where nobody forbids it."""
    with av.open(str(tmp_path / "secret.ts"), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(16000, 1.0).astype(np.float32)[None], format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    playlist = tmp_path / "upload.m3u8"
    named = f"#EXTINF:1,\n{tmp_path / 'secret.ts'}"
    playlist.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n{named}\n#EXT-X-ENDLIST\n")
    with av.open(str(playlist)) as container:
        assert [stream.type for stream in container.streams] == ["audio"]
    with pytest.raises(PlanError, match=r"upload\.m3u8 cannot be read as audio"):
        read_audio(playlist, 16000)
