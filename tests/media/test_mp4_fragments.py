"""A video in fragments: whole for who sees all, to be begun with at every key; nothing waits for what comes next."""

from __future__ import annotations

import io
import re
import struct
from itertools import pairwise

import av
import numpy as np
import pytest

from patchpar.media.mp4_fragments import ALONE, NEEDS_OTHERS, FragmentEncoder, Mp4Fragment, Mp4Header, with_lengths
from tests.media.test_video_encoder import RATE, decoded, frames, speech


def encoded(blocks: int, rate: int | None = RATE) -> tuple[Mp4Header, list[list[Mp4Fragment]]]:
    """(head, what each block completed and what the end did). Blocks of 0.2 s, the sound loud from 0.6 s on."""
    encoder = FragmentEncoder(20, 32, 48, rate)
    made = [
        encoder.add(frames(20 * b), b * 0.2, None if rate is None else speech(loudness=0.0 if b < 3 else 0.5))
        for b in range(blocks)
    ]
    made.append(encoder.close())
    return encoder.head, made


def unpacked(form: str, data: bytes, at: int) -> tuple[int, ...]:
    return struct.unpack_from(form, data, at)


def described(fragment: bytes) -> tuple[int, int, int, int, int]:
    """(number, track, time, duration, flags) of a fragment, as ISO/IEC 14496-12 places them behind each box's kind."""
    (number,) = unpacked(">I", fragment, fragment.index(b"mfhd") + 8)
    track, duration, _, flags = unpacked(">4I", fragment, fragment.index(b"tfhd") + 8)
    (time,) = unpacked(">Q", fragment, fragment.index(b"tfdt") + 8)
    return number, track, time, duration, flags


@pytest.mark.parametrize("rate", [RATE, None])
def test_fragments_are_a_video(rate: int | None) -> None:
    """Each block comes out at once and whole: its sound too, but for a bit that is no whole packet."""
    head, made = encoded(6, rate)
    times, levels, heard = decoded(head.data + b"".join(part.data for block in made for part in block))
    assert times == pytest.approx([number / 20 for number in range(24)], abs=2e-3)
    assert levels == pytest.approx([20 * (number // 4) for number in range(24)], abs=12)
    early, _, soon = decoded(head.data + b"".join(part.data for block in made[:3] for part in block))
    assert len(early) == 12
    assert (len(heard) > 40000) == (rate is not None)
    if rate is not None:
        assert len(soon) >= 0.6 * 48000 - 3 * 1024
        assert np.argmax(np.abs(heard) > 0.05) / 48000 == pytest.approx(0.6, abs=0.01)
    assert head.mime == f'video/mp4; codecs="avc1.64000a{", mp4a.40.2" if rate else ""}"'


def test_keys_are_those_that_can_be_begun_with() -> None:
    """Every second block of 0.2 s begins with a key. From there on the rest can be decoded, with its times."""
    head, made = encoded(8)
    parts = [part for block in made for part in block]
    keys = [number for number, part in enumerate(parts) if part.is_key]
    assert len(keys) == 4
    for count, number in enumerate(keys):
        times, levels, _ = decoded(head.data + b"".join(part.data for part in parts[number:]))
        assert times[0] == pytest.approx(0.4 * count, abs=2e-3)
        assert levels[0] == pytest.approx(40 * count, abs=12)
    with av.open(io.BytesIO(head.data + b"".join(part.data for part in parts[keys[1] + 1 :]))) as container:
        assert not next(packet for packet in container.demux(video=0) if packet.size).is_keyframe


def test_fragments_follow_one_another_in_time() -> None:
    """Video and audio in turn, numbered from 1, each as long as its sample; audio never needs another fragment."""
    head, made = encoded(6)
    units = [unpacked(">3I", head.data, box.end() + 4)[2] for box in re.finditer(b"mdhd", head.data)]
    found = [described(part.data) for block in made for part in block]
    assert [number for number, *_ in found] == list(range(1, len(found) + 1))
    times = [time / units[track - 1] for _, track, time, _, _ in found]
    assert all(0 <= later - time < 0.2 for time, later in pairwise(sorted(times)))
    for block in made:
        begun = [time / units[track - 1] for _, track, time, _, _ in (described(part.data) for part in block)]
        assert begun == sorted(begun)
    for kind, length in ((1, 1 / 20), (2, 1024 / 48000)):
        lengths = [duration / units[track - 1] for _, track, _, duration, _ in found if track == kind]
        assert lengths[:-1] == pytest.approx([length] * (len(lengths) - 1)), f"track {kind}"
    parts = [part for block in made for part in block]
    assert all(
        flags == (ALONE if part.is_key or track == 2 else NEEDS_OTHERS)
        for part, (_, track, _, _, flags) in zip(parts, found, strict=True)
    )


def test_the_end_has_the_last_audio() -> None:
    """An encoder holds back what is no whole packet, and one packet more."""
    head, made = encoded(6)
    _, _, heard = decoded(head.data + b"".join(part.data for block in made for part in block))
    assert len(heard) >= 1.2 * 48000 - 100


def test_units_get_their_lengths() -> None:
    """Start codes of three and of four bytes; zeros behind a unit are none of it."""
    stream = b"\x00\x00\x00\x01\x67ab\x00\x00\x01\x65c\x00\x00\x00\x00\x01\x06d\x00"
    assert with_lengths(stream) == b"\x00\x00\x00\x03\x67ab\x00\x00\x00\x02\x65c\x00\x00\x00\x02\x06d"


def test_lost_blocks_leave_a_gap() -> None:
    encoder = FragmentEncoder(20, 32, 48, RATE)
    made = [*encoder.add(frames(0), 0.0, speech()), *encoder.add(frames(200), 1.0, speech()), *encoder.close()]
    times, _, _ = decoded(encoder.head.data + b"".join(part.data for part in made))
    assert times == pytest.approx([0, 0.05, 0.1, 0.15, 1.0, 1.05, 1.1, 1.15], abs=2e-3)


def test_times_that_are_no_fraction_of_the_rate() -> None:
    """25 in a second, but the NTSC rate too, whose frames last 1001/30000 s."""
    for fps in (25.0, 30000 / 1001, 7.3):
        encoder = FragmentEncoder(fps, 32, 48, None)
        made = [part for block in range(20) for part in encoder.add(frames(10, 2), block * 2 / fps, None)]
        times, _, _ = decoded(encoder.head.data + b"".join(part.data for part in made))
        assert times == pytest.approx([number / fps for number in range(40)], abs=2e-3)
