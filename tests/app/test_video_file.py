"""An uploaded video is checked before it is decoded (format, length, size), then decoded frame by frame."""

from __future__ import annotations

import struct
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from app import limits, video_file
from app.video_file import VideoFile
from patchpar import PlanError

from .videos import BRIGHTER, grey_video


def shades(video: VideoFile, rate: float) -> list[int]:
    return [round(float(np.asarray(frame).mean()) / BRIGHTER) for frame in video.frames(rate)]


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".mkv"])
def test_so_many_frames_are_taken_from_a_second(tmp_path: Path, suffix: str) -> None:
    video = VideoFile.of(grey_video(tmp_path / f"video{suffix}", frames=20, fps=10))
    assert video.seconds == pytest.approx(2, abs=0.1)
    assert shades(video, 10) == list(range(20))
    assert shades(video, 5) == list(range(0, 20, 2))
    assert shades(video, 1) == [0, 10]
    assert shades(video, 30) == list(range(20))  # it has no more
    assert video.expected_frames(5) in (10, 11)


def test_frames_are_upright(tmp_path: Path) -> None:
    """Telephones video as they are held, and say how to turn it: here the left half is white, and comes out on top."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        values = np.zeros((64, 96, 3), np.uint8)
        values[:, :48] = 255
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(stream.encode())
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40  # ISO 14496-12, 8.3.2: a quarter turn, clockwise
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    frame = next(VideoFile.of(path).frames(10))
    assert frame.size == (64, 96)
    top, bottom = (np.asarray(frame)[rows].mean() for rows in (slice(0, 40), slice(56, 96)))
    assert (round(top / 255), round(bottom / 255)) == (1, 0)


def test_the_end_is_the_longest_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may say that it is short, and go on."""
    video = VideoFile.of(grey_video(tmp_path / "a.mp4", frames=20, fps=10))
    monkeypatch.setattr(video_file, "MAX_SECONDS", 1.0)
    assert shades(video, 10) == list(range(10))


def test_what_is_no_video_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, image, playlist = tmp_path / "a.mp4", tmp_path / "b.mp4", tmp_path / "c.mp4"
    text.write_bytes(b"no video at all" * 100)
    Image.new("RGB", (30, 20)).save(image, "PNG")
    playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n")
    for bad in (text, image, playlist):
        with pytest.raises(PlanError, match=r"the file cannot be read as a video: use \.mp4") as refused:
            VideoFile.of(bad)
        assert str(tmp_path) not in str(refused.value)
    with pytest.raises(PlanError, match="there is no video: choose one"):
        VideoFile.of(None)
    good = grey_video(tmp_path / "d.mp4", frames=20, fps=10)
    for name, limit, message in (
        ("MAX_SECONDS", 1.0, "the video has 2 s: at most 1 s are taken, so cut it"),
        ("MAX_FRAME_PIXELS", 6143, "a frame has 96 x 64 pixels: at most 0 million pixels are taken"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(video_file, name, limit)
            with pytest.raises(PlanError, match=message):
                VideoFile.of(good)
    monkeypatch.setattr(limits, "MAX_BYTES", 10)
    with pytest.raises(PlanError, match="the file has"):
        VideoFile.of(good)
