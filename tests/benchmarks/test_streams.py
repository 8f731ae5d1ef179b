"""What the benchmarks of streams say of figures that are known."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from benchmarks.page import contents
from benchmarks.stream import long, viewers
from benchmarks.stream.budget import onset
from benchmarks.stream.drift import rows
from benchmarks.stream.flicker import NOISE, flicker, noisy
from benchmarks.stream.image_ranks import WARM, Streamed
from benchmarks.stream.long import Record, table
from benchmarks.stream.onset import Found, half_open, lag_of
from benchmarks.stream.viewers import BINARY, Viewed, read_frame
from patchpar.media.mp4_fragments import fragment
from patchpar.plan.stream_plan import StreamPlan
from patchpar.plan.stream_simulation import StreamCosts


def record(sizes: list[tuple[int, int]]) -> Record:
    return Record(blocks=len(sizes), frames=8 * len(sizes), seconds=0.4 * len(sizes), resident=sizes)


def test_memory_that_grows_is_told_from_memory_that_does_not() -> None:
    """The first tenth does not count: buffers are taken once. Up and down is not growth."""
    sizes = [(50, 100), *[(100 + 20 * (number % 2), 100 + number) for number in range(9)]]
    flat, grown = record(sizes).courses()
    assert (flat.floor, flat.peak, flat.wave) == (0, 0, pytest.approx(0.2))
    assert (grown.floor, grown.peak, grown.wave) == (
        pytest.approx(0.04),
        pytest.approx(108 / 103 - 1),
        pytest.approx(0.08),
    )
    lines = table(record(sizes), "a plan", 20)[-2:]
    assert lines[0].endswith("| +0.0% | +0.0% | 20.0% | flat |")
    assert lines[1].endswith("| +4.0% | +4.9% | 8.0% | not flat |")


def test_a_viewer_counts_what_it_has_missed() -> None:
    """Fragments have numbers, also after the viewer has come again; the header of the file is none."""
    found, data = Viewed(name="a"), b""
    parts = [fragment(number, bytes(200), track=1, time=0, duration=1, is_key=True) for number in (4, 5, 9)]
    for payload in (b"....ftyp", *parts):
        data += bytes([0x80 | BINARY, 126]) + len(payload).to_bytes(2, "big") + payload
    file = io.BytesIO(data)
    for _ in range(4):
        kind, payload = read_frame(file)
        assert kind == BINARY
        found.add(payload)
    assert (found.fragments, found.missed, found.num_bytes) == (3, 3, len(data) - 4 * 4)
    with pytest.raises(EOFError):
        read_frame(file)


@pytest.mark.breadth
def test_long_streams_run(tmp_path: Path) -> None:
    """Shortly: of a stream as fast as it can be, and of one that is watched live."""
    long.main(["--blocks", "24", "--looks", "12", "--write", str(tmp_path / "long.md")])
    assert "24 blocks, 95 frames" in (tmp_path / "long.md").read_text()
    viewers.main(["--minutes", "0.3", "--looks", "20", "--write", str(tmp_path / "viewers.md")])
    assert "hour" not in (tmp_path / "viewers.md").read_text()
    _, rows = contents((tmp_path / "viewers.md").read_text())[0]["tables"]
    assert [row["viewer"] for row in rows if int(row["fragments"]) > 0] == ["first", "second", "slow"]


def test_drift_is_told_by_its_beginning_and_its_end() -> None:
    kept = [{"skin": 5.0}] * 20
    without = [{"skin": float(number)} for number in range(20)]
    assert rows(kept, without)[-1] == "| skin | 5.0 | 5.0 | 0.5 | 18.5 |"


def test_an_onset_stands_beside_its_budget() -> None:
    costs = StreamCosts(step=0.2, decode=0.15, frames=12, source=0.48)
    row = Found(what="asleep", budget=onset(StreamPlan.even(2, 3), costs), measured=1.2).row()
    assert row == "| asleep | 0.48 | 0.40 | 0.15 | 0.00 | 1.03 | 1.20 | +16.5% |"


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_how_far_a_mouth_is_behind(lag: int) -> None:
    meant = np.abs(np.sin(np.arange(48) ** 1.5))
    late = np.concatenate([np.zeros(lag), meant])[:48]
    assert lag_of(late + 0.05 * np.cos(np.arange(48)), meant) == lag
    assert half_open(np.array([0.0, 0.4, 0.6, 1.0])) == 2


def test_the_first_images_of_a_stream_do_not_count() -> None:
    times = [0.0, 100.0, *(100.0 + number for number in range(1, 6))]
    assert WARM == 2
    assert Streamed(times=tuple(times), images=()).gap == 1.0


def test_flicker_is_what_neighbouring_frames_differ_by() -> None:
    """A still scene has none, a camera's noise has its own, and a slow change of the whole range has little."""
    scene = np.full((32, 32, 3), 128, np.uint8)
    assert flicker([scene] * 5) == 0
    assert flicker([scene, scene + 10, scene]) == 10
    assert flicker(noisy(scene, 9)) == pytest.approx(NOISE * 2 / np.pi**0.5, rel=0.03)
    fade = [np.full((32, 32, 3), level, np.uint8) for level in range(100, 156)]
    assert flicker(fade) == 1
    assert flicker([*fade[::2], *fade[1::2]]) > 2, "the control: the same frames in another order"
