"""A pipeline's output as a video file: its values as bytes, all frames at their rate, in every container."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch

from patchpar.errors import PlanError
from patchpar.media.video_file import FORMATS, frames_of, write_video


def test_values_beyond_black_and_white_are_black_and_white() -> None:
    """As decoders give them; bytes would begin again at the other end."""
    values = np.array([-0.2, 0.0, 1.0, 1.2], np.float32).reshape(1, 2, 2, 1).repeat(3, 3)
    for given in (values, torch.from_numpy(values).permute(0, 3, 1, 2).to(torch.bfloat16)):
        found = frames_of(SimpleNamespace(frames=[given]))
        assert found is not None
        assert found[0, :, :, 0].tolist() == [[0, 0], [255, 255]]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_has_all_frames_at_their_rate(suffix: str, tmp_path: Path) -> None:
    """Wider than high, of a gradient that grows brighter, in a profile that browsers play."""
    gradient = np.arange(96, dtype=np.uint8)[None, None, :, None] + np.zeros((1, 64, 1, 3), np.uint8)
    frames = np.concatenate([gradient + 20 * number for number in range(8)]).astype(np.uint8)
    path = tmp_path / f"a{suffix}"
    write_video(frames, str(path), 12, suffix)
    with av.open(str(path)) as container:
        track = container.streams.video[0]
        images = list(container.decode(video=0))
        assert track.codec_context.profile in ("High", "Profile 0")
    assert [float(image.time) for image in images] == pytest.approx([number / 12 for number in range(8)], abs=2e-3)
    found = np.stack([image.to_ndarray(format="rgb24") for image in images]).astype(int)
    assert found.shape == frames.shape
    assert np.abs(found - frames).mean() < 3


@pytest.mark.parametrize(("height", "width"), [(7, 8), (8, 7)])
def test_odd_sides_are_refused_and_nothing_is_written(height: int, width: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"{height} x {width}: video needs an even height and width"):
        write_video(np.zeros((2, height, width, 3), np.uint8), str(tmp_path / "a.mp4"), 8)
    assert list(tmp_path.iterdir()) == []
