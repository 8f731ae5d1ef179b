"""Microphones and cameras of a stream with ranks that only pretend: what comes is used, and what stops ends nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media import capture_device
from patchpar.media.capture_device import CaptureDevice, camera, microphone
from patchpar.stream.audio_track import AudioTrack, KeepAlive
from patchpar.stream.delivery import StreamDelivery
from patchpar.stream.live_inputs import AHEAD_SECONDS, QUIET_SECONDS, Camera, LiveAudio, LiveFrames
from patchpar.stream.session import StreamSession
from patchpar.stream.video_source import FrameSources, LiveVideo
from tests.stream.test_session import COURSE, FORMAT, Ranks, session
from tests.stream.tiny import AUDIO, FRAMES
from tests.tensors import noise

PIECE = AUDIO.rate // 50


class Source:
    """Pieces of audio, or images, that a test has; then an error, if there is one."""

    def __init__(self, pieces: Any, *, ends: bool = False, error: str = "", name: str = "the microphone") -> None:
        self._pieces, self.ends, self._error, self.name = pieces, ends, error, name
        self.taken = 0

    def audio(self) -> Iterator[tuple[Tensor, int]]:
        for piece in self._pieces:
            self.taken += 1
            yield piece, AUDIO.rate
        if self._error:
            raise PlanError(self._error)

    def images(self) -> Iterator[Any]:
        for piece in self._pieces:
            self.taken += 1
            yield piece
        if self._error:
            raise PlanError(self._error)


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_pipe_is_heard_whole_and_ends_the_stream() -> None:
    """Sample for sample as it was pushed, and read no further ahead than some seconds."""
    samples = noise(5 * AUDIO.rate, seed=1) / 10
    source = Source(samples.split(PIECE), ends=True)
    with session(Ranks(), blocks=None, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        live = LiveAudio(source, stream)
        live.start()
        until(lambda: stream.audio_ahead > AHEAD_SECONDS)
        time.sleep(0.1)
        assert source.taken * PIECE / AUDIO.rate < AHEAD_SECONDS + 1.5  # the blocks in flight, and a piece
        heard = torch.cat([chunk.audio for chunk in stream if chunk.audio is not None])
    assert torch.equal(heard[: len(samples)], samples)
    assert float(heard[len(samples) :].abs().sum()) == 0
    assert live.note == ""


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (
            "the microphone has stopped: No such device",
            "the microphone has stopped: No such device; the stream goes on",
        ),
        pytest.param("", "the microphone has stopped; the stream goes on with silence", marks=pytest.mark.breadth),
    ],
)
def test_a_microphone_that_stops_does_not_end_the_stream(error: str, note: str) -> None:
    """Silence follows what was heard; the control, without keep-alive, waits for more."""
    spoken = torch.full((AUDIO.rate // 2,), 0.5)
    source = Source([spoken], error=error)
    track = AudioTrack(AUDIO, FRAMES, KeepAlive())
    with session(Ranks(), blocks=8, track=track).begin() as stream:
        live = LiveAudio(source, stream)
        live.start()
        heard = torch.cat([chunk.audio for chunk in stream if chunk.audio is not None])
    assert float(heard[: len(spoken)].mean()) == 0.5
    assert float(heard[len(spoken) :].abs().sum()) == 0
    assert len(heard) > AUDIO.rate
    assert note in live.note
    waiting = session(Ranks(), blocks=8, track=AudioTrack(AUDIO, FRAMES), hold=1.0).begin()
    with waiting as stream:
        LiveAudio(Source([spoken]), stream).start()
        assert len(list(islice(stream, 2))) == 2
        time.sleep(0.5)
        assert stream.in_flight == 0
        assert stream.status == "running"


@pytest.mark.parametrize("is_kept_alive", [True, False])
def test_a_microphone_that_is_silent_is_noted(is_kept_alive: bool) -> None:
    """And what the stream does meanwhile: without keep-alive there is no silence, it waits."""
    until_then = "there is silence" if is_kept_alive else "the stream waits"
    speak, stop = threading.Event(), threading.Event()

    def pieces() -> Iterator[Tensor]:
        assert speak.wait(20)
        yield torch.zeros(PIECE)
        assert stop.wait(20)

    track = AudioTrack(AUDIO, FRAMES, KeepAlive() if is_kept_alive else None)
    with session(Ranks(), blocks=None, track=track).begin() as stream:
        live = LiveAudio(Source(pieces()), stream)
        live.start()
        assert live.note == f"no audio from the microphone yet; {until_then} until then"
        speak.set()
        until(lambda: live.note == "")
        until(lambda: live.note == f"no audio from the microphone any more; {until_then} until it goes on")
        stop.set()


def test_a_pipe_that_fails_ends_the_stream_and_is_noted() -> None:
    """Whatever it raises; without keep-alive the stream would wait for the rest for ever."""

    def breaks() -> Iterator[Tensor]:
        yield torch.full((AUDIO.rate,), 0.5)
        raise OSError("Input/output error")

    with session(Ranks(), blocks=None, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        live = LiveAudio(Source(breaks(), ends=True, name="the pipe"), stream)
        live.start()
        until(lambda: live.note == "the pipe cannot be read: Input/output error; the stream ends there")
        ends = threading.Timer(10, stream.cancel)
        ends.start()
        heard = torch.cat([chunk.audio for chunk in stream if chunk.audio is not None])
        ends.cancel()
        assert stream.status == "finished"
    assert float(heard[: AUDIO.rate].min()) == 0.5


def test_a_camera_that_fails_is_noted() -> None:
    def breaks() -> Iterator[Any]:
        yield Image.new("RGB", (2, 2))
        raise OSError("Input/output error")

    found = Camera(Source(breaks(), name="the camera"))
    found.start()
    until(lambda: found.note == "the camera cannot be read: Input/output error; its last image stays")


def test_audio_that_cannot_be_used_is_noted() -> None:
    with session(Ranks(), blocks=None, track=AudioTrack(AUDIO, FRAMES)).begin() as stream:
        live = LiveAudio(Source([torch.full((100,), float("nan"))]), stream)
        live.start()
        until(lambda: "values that are no numbers; the stream goes on with silence" in live.note)


# --- images --------------------------------------------------------------------------------------------------------


def live_video(ranks: Ranks, blocks: int | None = 4) -> StreamSession:
    video = LiveVideo(lambda block: FORMAT.first_frame(block + 1) - FORMAT.first_frame(block))
    frames = FrameSources(video=video)
    return StreamSession(ranks.run, (COURSE,), FORMAT, StreamDelivery(), None, frames, credit=3, blocks=blocks)


def frame(value: int) -> Tensor:
    return torch.full((FORMAT.height, FORMAT.width, 3), value, dtype=torch.uint8)


def filled(stream: StreamSession, ranks: Ranks, blocks: int) -> list[int]:
    """Push the frames of so many blocks, each once the one before has begun. Returns the blocks that they are for."""
    effects = []
    for block in range(blocks):
        for value in range(FORMAT.first_frame(block), FORMAT.first_frame(block + 1)):
            assert len(ranks.begun) == block
            effects.append(stream.push_frame(frame(value)).block)
        until(lambda block=block: len(ranks.begun) > block)  # type: ignore[misc]
    return effects


def levels(ranks: Ranks) -> list[list[int]]:
    return [begin.frames[:, 0, 0, 0].tolist() for _, begin in ranks.begun if begin.frames is not None]


def test_a_block_begins_when_its_frames_are_here() -> None:
    ranks = Ranks()
    with live_video(ranks, blocks=3).begin() as stream:
        assert filled(stream, ranks, 3) == [0] * 3 + [1] * 4 + [2] * 4
        assert len(list(stream)) == 3
    assert levels(ranks) == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    refused = pytest.raises(PlanError, match="this stream takes no frames: use video='live'")
    with session(Ranks()).begin() as other, refused:
        other.push_frame(frame(0))


def test_the_caller_may_use_its_buffers_again() -> None:
    """As callbacks of microphones do, and loops over a camera."""
    samples, pixels = np.ones(AUDIO.rate, np.float32), frame(1)
    track = AudioTrack(AUDIO, FRAMES)
    track.push(torch.as_tensor(samples), AUDIO.rate)
    samples[:] = 0
    assert float(track.take(0)[1].min()) == 1
    ranks = Ranks()
    with live_video(ranks, blocks=1).begin() as stream:
        for value in range(3):
            stream.push_frame(pixels.fill_(value))
        pixels.fill_(9)
        assert len(list(stream)) == 1
    assert levels(ranks) == [[0, 1, 2]]


def test_a_rate_is_any_number_that_is_whole() -> None:
    track = AudioTrack(AUDIO, FRAMES)
    for rate in (22050.0, np.int64(22050), np.float32(22050)):
        track.push(torch.zeros(10), rate)  # type: ignore[arg-type]
    for rate in (22050.5, float("nan"), "22050", True):
        with pytest.raises(PlanError, match="samples per second: 1000 to 384000 are understood"):
            track.push(torch.zeros(10), rate)  # type: ignore[arg-type]


def test_of_frames_that_wait_the_oldest_go() -> None:
    """Nobody takes chunks, so that no block begins beyond the credit of 3."""
    ranks = Ranks()
    with live_video(ranks, blocks=None).begin() as stream:
        filled(stream, ranks, 3)
        for value in range(100):
            stream.push_frame(frame(value))
        assert len(ranks.begun) == 3
        next(stream)
        until(lambda: len(ranks.begun) == 4)
    assert levels(ranks)[3] == [95, 96, 97, 98]


def test_a_camera_that_goes_away_does_not_end_the_stream() -> None:
    """Grey before its first image, and the last one after it has gone."""
    switch_on, show = threading.Event(), threading.Event()

    def images() -> Iterator[Any]:
        assert switch_on.wait(20)
        yield Image.new("RGB", (50, 40), (200, 0, 0))
        assert show.wait(20)

    ranks = Ranks()
    found = Camera(Source(images(), error="the camera has stopped: No such device", name="the camera"))
    with live_video(ranks, blocks=8).begin() as stream:
        found.start()
        LiveFrames(found, stream, FORMAT.fps, FORMAT.height, FORMAT.width).start()
        next(stream)
        assert found.note == "no image from the camera yet"
        switch_on.set()
        until(lambda: found.note == "")
        until(lambda: found.note == "no image from the camera any more; its last image stays until it goes on")
        show.set()
        until(lambda: found.note == "the camera has stopped: No such device; its last image stays")
        assert len(list(stream)) == 7
    firsts = [begin.frames[-1, 0, 0].tolist() for _, begin in ranks.begun]
    assert firsts[0] == [128, 128, 128]
    assert firsts[-1] == [200, 0, 0]


def test_an_image_that_does_not_fit_does_not_end_the_stream() -> None:
    """Such as an array of another size: the frame before stays, and a note says so."""
    ranks, found = Ranks(), Camera(Source([np.zeros((5, 5, 3), np.uint8)], name="the camera"))
    with live_video(ranks, blocks=3).begin() as stream:
        found.start()
        until(lambda: found.newest[0] == 1)
        LiveFrames(found, stream, FORMAT.fps, FORMAT.height, FORMAT.width).start()
        assert len(list(stream)) == 3
    assert levels(ranks)[0] == [128] * 3
    assert found.note.startswith("a reference of shape (5, 5, 3) in torch.uint8 does not fit: give a file")


def test_an_image_model_takes_the_newest_image() -> None:
    """One after another as they come; the last one again where none comes; an error where there never was one."""
    over, go = threading.Event(), threading.Event()

    def images() -> Iterator[int]:
        yield from range(3)
        assert go.wait(20)
        yield 3

    found = Camera(Source(images()))
    found.start()
    until(lambda: found.newest == (3, 2))
    taken = found.images(over)
    began = time.monotonic()
    assert [next(taken), next(taken)] == [2, 2]
    assert time.monotonic() - began >= QUIET_SECONDS
    go.set()
    assert next(taken) == 3
    over.set()
    assert next(taken, None) is None
    broken = Camera(Source([], error="the camera has stopped"))
    broken.start()
    with pytest.raises(PlanError, match="the camera has stopped"):
        next(broken.images(threading.Event()))


# --- devices: FFmpeg's generators are opened as devices are -----------------------------------------------------------


def test_a_microphone() -> None:
    """Of 3 channels at 7 kHz: sample by sample as it gives them, and then it has gone."""
    found = CaptureDevice(form="lavfi", device="aevalsrc=0.5|0.25|0:s=7000:d=0.5", name="the microphone")
    found.check()
    pieces = list(islice(found.audio(), 3))
    assert {rate for _, rate in pieces} == {7000}
    assert torch.cat([samples for samples, _ in pieces], 1).mean(1).tolist() == pytest.approx([0.5, 0.25, 0])
    with pytest.raises(PlanError, match="the microphone has stopped"):
        list(found.audio())
    with pytest.raises(PlanError, match="has no images"):
        next(found.images())


def test_a_camera() -> None:
    found = CaptureDevice(form="lavfi", device="color=red:size=32x24:rate=10:duration=0.5", name="the camera")
    first = next(found.images())
    assert first.size == (32, 24)
    assert np.abs(np.asarray(first).mean((0, 1)) - (254, 0, 0)).max() < 4
    with pytest.raises(PlanError, match="the camera has stopped"):
        list(found.images())
    with pytest.raises(PlanError, match="has no audio"):
        next(found.audio())


def test_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        PlanError, match=r"--audio mic: the microphone cannot be opened \(.*alsa none: .*\): name another"
    ) as raised:
        microphone("none", "linux")
    assert "arecord -t wav -f S16_LE -r 16000 | patchpar stream --audio -" in str(raised.value)
    with pytest.raises(PlanError, match=r"--input camera: the camera cannot be opened \(v4l2 /dev/none: No such file"):
        camera("/dev/none", "linux")
    with pytest.raises(PlanError, match="dshow devices have no default"):
        camera(None, "win32")
    with pytest.raises(PlanError, match="not known on this platform"):
        microphone(None, "plan9")
    tested = {"linux": (("none", "default"), ("lavfi", "sine"))}
    monkeypatch.setattr(capture_device, "MICROPHONES", tested)
    assert str(microphone(None, "linux")) == "lavfi sine"


def test_a_device_from_which_nothing_comes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FFmpeg reads the first frame before a camera is open, without a limit: a pipe without data stands for one."""
    os.mkfifo(tmp_path / "quiet")
    writer = os.open(tmp_path / "quiet", os.O_RDWR)
    monkeypatch.setattr(capture_device, "CAMERAS", {"linux": (("mjpeg", str(tmp_path / "quiet")),)})
    monkeypatch.setattr(capture_device, "OPEN_SECONDS", 0.3, raising=False)
    refused = list[str]()

    def ask() -> None:
        with pytest.raises(PlanError) as raised:
            camera(None, "linux")
        refused.append(str(raised.value))

    asked = threading.Thread(target=ask, daemon=True)
    asked.start()
    asked.join(10)
    os.close(writer)
    assert len(refused) == 1
    assert "quiet: nothing came from it for 0.3 s" in refused[0]
