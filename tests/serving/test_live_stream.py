"""A stream of a server whose parts fail: its devices become free all the same, and the others go on."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchpar.errors import PlanError, WorkerDied
from patchpar.serving.http.application import stream_application
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import ServedModel, ServerSettings
from patchpar.serving.streams import live_stream
from patchpar.serving.streams.live_stream import LiveStream
from patchpar.serving.streams.stream_request import LiveStreamRequest
from patchpar.serving.streams.stream_service import StreamService
from patchpar.stream.delivery import Effect
from tests.serving.requests import client_of, until
from tests.stream.test_speech_pipeline import write_poses


class Session:
    """One that runs until it is stopped or cancelled. `fails`: what its end raises."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.status, self.audio_ahead, self.fails = "running", 0.0, fails
        self.dropped, self.behind = 0, 0.0
        self._over = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        self._over.wait(20)
        return iter(())

    def push_audio(self, samples: Any, rate: int) -> Effect:
        self.audio_ahead += len(samples) / rate
        return Effect(block=0, seconds=0.0)

    def stop(self) -> None:
        self.status = "finished"
        self._over.set()

    def cancel(self) -> None:
        self.status = "cancelled"
        self._over.set()

    def close(self) -> None:
        self.cancel()
        if self.fails is not None:
            raise self.fails


def stream_of(session: Any, ended: Callable[[bool], object] = lambda is_free: None) -> LiveStream:
    return LiveStream(session, owner="", fps=10, rate=None, audio_rate=8000, ended=ended)


def test_a_lost_worker_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Clients are told the stream, under which the log has the reason."""
    stream = stream_of(Session(WorkerDied("the reason", rank=1))).start()
    stream.stop()
    assert stream.over.wait(20)
    (found,) = (each for each in caplog.records if stream.id in each.getMessage())
    assert "the reason" in str(found.exc_info)


def test_whatever_fails_the_devices_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise OSError("the encoder is broken")

    monkeypatch.setattr(live_stream.VideoFeedWriter, "close", broken)
    free = []
    stream = stream_of(Session(), free.append).start()
    stream.stop()
    assert stream.over.wait(20)
    assert (free, stream.status) == ([True], "failed")
    assert isinstance(stream.error, OSError)
    assert stream.video.is_over
    assert stream.images.is_over


class Pipe:
    """A pipeline of streams that has one session."""

    rate, config, is_computing = None, type("Config", (), {"fps": 10})(), False

    def __init__(self, session: Session) -> None:
        self._session = session

    def stream(self, *args: Any, **kwargs: Any) -> Session:
        return self._session

    def close(self, *, wait: bool = True) -> None: ...


def service_of(session: Session) -> StreamService:
    found = StreamService(ServedModel(model="face", devices=("cpu",)), ServerSettings())
    found.adopt([Pipe(session)])  # type: ignore[list-item]
    return found


def test_devices_that_do_not_end_a_stream_are_given_to_nobody() -> None:
    service = service_of(Session(PlanError("the ranks did not end the stream within 60 s")))
    stream = service.create(LiveStreamRequest(), "")
    stream.cancel()
    assert stream.over.wait(20)
    assert service.state == "lost"
    with pytest.raises(RequestError, match="all 1 streams are taken"):
        service.create(LiveStreamRequest(), "")


def test_chunks_of_live_audio_are_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthesised speech is sent faster than it is spoken; see the session's own test."""
    asked: list[Any] = []
    session = Session()
    monkeypatch.setattr(Pipe, "stream", lambda *args, **kwargs: (asked.append(kwargs), session)[1])
    service_of(session).create(LiveStreamRequest(audio="live"), "").cancel()
    assert (asked[0]["audio"], asked[0]["delivery"].output) == ("live", "block")


def test_files_of_a_form_come_to_the_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Poses as a file object, whose images are read while the stream runs; nothing is kept on disk."""
    asked: list[Any] = []
    monkeypatch.setattr(Pipe, "stream", lambda *args, **kwargs: (asked.append(kwargs), Session())[1])
    poses, face = write_poses(tmp_path / "poses.mp4", 3).read_bytes(), io.BytesIO()
    Image.new("RGB", (4, 4)).save(face, "PNG")
    files = {"pose": ("a.mp4", poses), "reference": ("a.png", face.getvalue())}
    service = service_of(Session())
    response = client_of(stream_application(service)).post("/v1/streams", files=files)
    assert response.status_code == 200, response.text
    service.all_of("")[0].cancel()
    assert (asked[0]["pose"].read(), asked[0]["reference"].size, asked[0]["audio"]) == (poses, (4, 4), None)


def test_a_stream_that_begins_while_the_server_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    service = service_of(session)
    monkeypatch.setattr(Pipe, "stream", lambda *args, **kwargs: [session, service.drain(0)][0])
    with pytest.raises(RequestError, match="the server is ending"):
        service.create(LiveStreamRequest(), "")
    assert session.status == "cancelled"
    assert service.all_of("") == []


def test_a_stream_that_stands_still_ends_although_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(live_stream, "STILL_SECONDS", 0.2)
    stream = stream_of(Session())
    stream.images.watchers = 1
    stream.start()
    until(stream.over.is_set, "it to end")
    assert stream.status == "cancelled"


def test_audio_is_limited_by_what_is_held_and_not_by_what_was_sent() -> None:
    session = Session()
    stream = stream_of(session)
    second = bytes(16_000)
    for _ in range(60):
        assert stream.push(second) == {"block": 0, "seconds": 0.0}
    with pytest.raises(RequestError, match="audio is 60 s ahead of the video, and at most 60 s are held"):
        stream.push(second)
    session.audio_ahead = 0.0  # an interruption has dropped it
    assert stream.push(second)
    assert stream.push(b"") == {}
