"""What is encoded as it comes can be decoded: frames at their times, sound at its time."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.mp4_fragments import QUICK
from patchpar.media.video_encoder import VideoFormat, VideoWriter

RATE = 16000


def frames(level: int, count: int = 4) -> Tensor:
    return torch.full((count, 32, 48, 3), level, dtype=torch.uint8)


def speech(count: int = 4, loudness: float = 0.5) -> Tensor:
    return torch.sin(torch.arange(count * RATE // 20) * 0.1) * loudness


def decoded(data: bytes) -> tuple[list[float], list[float], np.ndarray]:
    """(times of frames, their mean levels, samples)."""
    with av.open(io.BytesIO(data)) as container:
        images = list(container.decode(video=0))
    with av.open(io.BytesIO(data)) as container:
        heard = [frame.to_ndarray()[0] for frame in container.decode(audio=0)] if container.streams.audio else []
    levels = [float(image.to_ndarray(format="rgb24").mean()) for image in images]
    return [float(image.time) for image in images], levels, np.concatenate(heard) if heard else np.zeros(0)


@pytest.mark.parametrize(("container", "audios"), [("mp4", "aac"), ("matroska", "aac"), ("webm", "libopus")])
def test_frames_and_audio_at_their_times(container: str, audios: str, tmp_path: Path) -> None:
    video = "libvpx-vp9" if container == "webm" else "libx264"
    form = VideoFormat(fps=20, height=32, width=48, rate=RATE, container=container, video=video, audio=audios)
    writer = VideoWriter(str(tmp_path / "film"), form)
    for block in range(5):
        writer.add(frames(50 * block), block * 0.2, speech(loudness=0.0 if block < 3 else 0.5))
    writer.close()
    times, levels, heard = decoded((tmp_path / "film").read_bytes())
    assert times == pytest.approx([number / 20 for number in range(20)], abs=2e-3)
    assert levels == pytest.approx([50 * (number // 4) for number in range(20)], abs=12)
    loud = np.abs(heard) > 0.05
    assert np.argmax(loud) / 48000 == pytest.approx(0.6, abs=0.05)


def test_lost_blocks_leave_a_gap_of_their_length(tmp_path: Path) -> None:
    writer = VideoWriter(str(tmp_path / "film.mp4"), VideoFormat(fps=20, height=32, width=48, rate=RATE))
    writer.add(frames(0), 0.0, speech(loudness=0.0))
    writer.add(frames(200), 1.0, speech())
    writer.add(frames(200), 1.2, speech())
    writer.close()
    times, _, heard = decoded((tmp_path / "film.mp4").read_bytes())
    later = [1.0 + number / 20 for number in range(8)]
    assert times == pytest.approx([0, 0.05, 0.1, 0.15, *later], abs=2e-3)
    assert np.argmax(np.abs(heard) > 0.05) / 48000 == pytest.approx(1.0, abs=0.05)
    assert len(heard) / 48000 == pytest.approx(1.4, abs=0.05), "silence once, and not before each later block"


def test_blocks_without_audio_are_silent(tmp_path: Path) -> None:
    writer = VideoWriter(str(tmp_path / "film.mp4"), VideoFormat(fps=20, height=32, width=48, rate=RATE))
    writer.add(frames(0), 0.0)
    writer.add(frames(0), 0.2, speech())
    writer.close()
    heard = decoded((tmp_path / "film.mp4").read_bytes())[2]
    assert np.argmax(np.abs(heard) > 0.05) / 48000 == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_every_frame_is_shown_as_long_as_the_others(container: str, tmp_path: Path) -> None:
    """The last one too, behind which no other comes. Nor is there a track of audio that nobody gives."""
    writer = VideoWriter(str(tmp_path / "film"), VideoFormat(fps=20, height=32, width=48, container=container))
    writer.add(frames(100, count=5), 0.0)
    writer.close()
    with av.open(tmp_path / "film") as written:
        assert [stream.type for stream in written.streams] == ["video"]
        found = [float(packet.duration * packet.time_base) for packet in written.demux(video=0) if packet.size]
        assert written.duration / 1e6 == pytest.approx(0.25, abs=1e-3)
    assert found == pytest.approx([0.05] * 5, abs=1e-3)


def test_the_encoder_gets_its_options() -> None:
    """Or files of any wanted quality are of one size."""
    noise = torch.randint(0, 256, (4, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sizes = []
    for quality in ("1", "50"):
        data = io.BytesIO()
        writer = VideoWriter(data, VideoFormat(fps=20, height=32, width=48, options={"crf": quality}))
        writer.add(noise, 0.0)
        writer.close()
        sizes.append(len(data.getvalue()))
    assert sizes[0] > 4 * sizes[1]


@pytest.mark.parametrize(("height", "width"), [(7, 8), (8, 7)])
def test_odd_sides_are_refused(height: int, width: int) -> None:
    with pytest.raises(PlanError, match=f"{height} x {width}: video needs an even height and width"):
        VideoFormat(fps=20, height=height, width=width)


def test_a_live_video_begins_anew_with_a_block_and_not_too_often() -> None:
    """Blocks of a frame each: one that can be begun with every 0.4 s. Without it: the first one only."""
    for is_live, wanted in ((True, [0.0, 0.4, 0.8]), (False, [0.0])):
        data = io.BytesIO()
        form = VideoFormat(fps=20, height=32, width=48, options=QUICK, is_live=is_live)
        writer = VideoWriter(data, form)
        for number in range(20):
            writer.add(frames(100, count=1), number / 20)
        writer.close()
        with av.open(io.BytesIO(data.getvalue())) as container:
            keys = [float(packet.pts * packet.time_base) for packet in container.demux(video=0) if packet.is_keyframe]
        assert keys == pytest.approx(wanted, abs=1e-3)
