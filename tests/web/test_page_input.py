"""What the page of a stream sends: audio and images of one page at a time; what cannot be used is answered in words."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from patchpar.errors import PlanError
from patchpar.stream.video_source import load_reference_image
from patchpar.web import http_page
from patchpar.web.page_input import PageCamera, PageInputs, PageMicrophone, image_of
from patchpar.web.server import HOME
from patchpar.web.viewer import VideoScreen
from tests.media.test_image_file import huge_png
from tests.media.test_video_encoder import RATE
from tests.web.test_pages import fetch, until

Inputs = tuple[VideoScreen, PageMicrophone, PageCamera]


@pytest.fixture(scope="module")
def served() -> Iterator[Inputs]:
    microphone, camera = PageMicrophone(), PageCamera()
    screen = VideoScreen(HOME, 0, 20, RATE, PageInputs(microphone=microphone, camera=camera))
    screen.open()
    yield screen, microphone, camera
    screen.close()


def opened(screen: VideoScreen, path: str = "/video", **options: Any) -> ClientConnection:
    return connect(screen.page.url.replace("http", "ws") + path, open_timeout=20, close_timeout=0.5, **options)


def send(socket: ClientConnection, kind: str, **values: Any) -> None:
    socket.send(json.dumps({"type": kind, **values}))


def refusal(socket: ClientConnection) -> str:
    answer = json.loads(socket.recv(20))
    assert answer["type"] == "error"
    return str(answer["message"])


def jpeg(colour: str, size: tuple[int, int] = (32, 24)) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, "JPEG")
    return data.getvalue()


def test_audio_of_one_page_at_a_time(served: Inputs) -> None:
    """Of 3 channels at 7 kHz too. Another page may speak once the first has stopped, or has gone."""
    screen, microphone, _ = served
    pieces = microphone.audio()
    with opened(screen) as one, opened(screen) as other:
        send(one, "audio_begin", rate=7000, channels=3)
        one.send(np.array([[8192, 0, -16384]] * 140, "<i2").tobytes())
        samples, rate = next(pieces)
        assert rate == 7000
        assert torch.equal(samples, torch.tensor([[0.25], [0.0], [-0.5]]).expand(3, 140))
        one.send(bytes(6))
        assert next(pieces)[0].shape == (3, 1), "and further ones"
        send(other, "audio_begin", rate=48000)
        assert refusal(other) == "the microphone of the page is in use by another page: stop it there first"
        other.send(bytes(960))
        assert refusal(other) == "the microphone of the page has not begun: send its beginning first"
        one.close()
        until(lambda: microphone._sender is None, "that it is free")
        send(other, "audio_begin", rate=48000)
        other.send(np.full(480, -32768, "<i2").tobytes())
        samples, rate = next(pieces)
        assert (rate, samples.shape, float(samples.max())) == (48000, (1, 480), -1.0)
        send(other, "audio_end")
        until(lambda: microphone._sender is None, "that it is free")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"type": "audio_begin", "rate": 500}, "audio at 500 samples per second: 1000 to 384000 are understood"),
        ({"type": "audio_begin", "rate": "fast"}, "audio at fast samples per second"),
        ({"type": "audio_begin", "rate": 7000, "channels": 9}, "audio of 9 channels: 1 to 8 are understood"),
        ({"type": "shout"}, "a message of type 'shout': send audio_begin, samples, audio_end"),
        ("[1]", "the message holds no JSON object, but a list"),
        ("{", "the message is not valid JSON"),
        pytest.param("[" * 100_000, "the message is not valid JSON", id="nested"),
        (bytes(961), "961 bytes of audio: samples of 1 channels have 2 bytes"),
        (bytes(2**20 + 2), "a message of 1048578 bytes: at most 1048576 are taken"),
    ],
)
def test_messages_that_cannot_be_used(message: Any, reason: str, served: Inputs) -> None:
    screen, microphone, _ = served
    with opened(screen) as socket:
        socket.send(json.dumps(message) if isinstance(message, dict) else message)
        assert reason in refusal(socket)
        assert microphone._sender is None, "it is free for others"


def test_of_audio_that_waits_the_oldest_is_dropped() -> None:
    microphone, sender = PageMicrophone(), object()
    microphone.begin(sender)
    for number in range(150):
        microphone.put(sender, (torch.full((1, 1), float(number)), 1000))
    microphone.close()
    assert [int(samples) for samples, _ in microphone.audio()] == list(range(50, 150))


def test_who_does_not_send_ends_nothing_of_who_does() -> None:
    """Such as a page that is closed while another one sends. Of images that wait the newest is taken."""
    camera, sender, other = PageCamera(), object(), object()
    camera.begin(sender)
    camera.end(other)
    with pytest.raises(PlanError, match="in use by another page"):
        camera.begin(other)
    for image in ("first", "second"):
        camera.put(sender, image)
    camera.close()
    assert list(camera.images()) == ["second"]


def test_inputs_end_with_their_page() -> None:
    """What reads them would wait for ever."""
    microphone, camera = PageMicrophone(), PageCamera()
    VideoScreen(HOME, 0, 20, RATE, PageInputs(microphone=microphone, camera=camera)).close()
    assert (microphone._is_over, camera._is_over) == (True, True)
    assert [*microphone.audio(), *camera.images()] == []


def test_images_of_one_page_at_a_time(served: Inputs) -> None:
    screen, _, camera = served
    images = camera.images()
    with opened(screen, "/camera") as one:
        one.send(jpeg("red"))
        first = next(images)
        assert first.size == (32, 24)
        assert np.abs(np.asarray(first).mean((0, 1)) - (254, 0, 0)).max() < 4
        with opened(screen, "/camera") as other:
            assert "the camera of the page is in use by another page" in refusal(other)
        one.send(b"no image")
        assert refusal(one) == "the image cannot be read as an image: use JPEG, PNG, WEBP"
    until(lambda: camera._sender is None, "that it is free")
    with pytest.raises(PlanError, match="the image has 4097 x 4096 pixels: at most 17 million are taken"):
        image_of(jpeg("red", (4097, 4096)))
    with pytest.raises(PlanError, match=r"a message of \d{7} bytes: at most 1048576 are taken"):
        image_of(jpeg("red") + bytes(2**20))


def test_an_image_that_breaks_its_reader_is_a_sentence(tmp_path: Path) -> None:
    """A PNG of 60,000 x 60,000 pixels, of which Pillow raises an error of its own; and EXIF that is none."""
    with pytest.raises(PlanError, match="the image has too many pixels: at most 17 million are taken"):
        image_of(huge_png(tmp_path / "huge.png", 60_000).read_bytes())
    good = jpeg("red")
    exif = b"Exif\0\0no TIFF at all"
    broken = good[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + good[2:]
    assert load_reference_image(image_of(broken), 24, 32).shape == (24, 32, 3)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the terminal hears of the server."""
    found = list[str]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: found.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [handler])
    return found


def test_a_page_that_goes_before_its_answer_is_no_error_of_the_server(
    served: Inputs, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its image is looked at meanwhile, and cannot be used."""
    screen, _, camera = served
    has_gone = threading.Event()

    def slow_image_of(data: bytes) -> Any:
        assert has_gone.wait(20)
        return image_of(data)

    monkeypatch.setattr(http_page, "image_of", slow_image_of)
    with opened(screen, "/camera") as socket:
        socket.send(b"no image")
        until(lambda: camera._sender, "its message")
    has_gone.set()
    until(lambda: camera._sender is None, "that it is free")
    with fetch(screen.page.url):  # by then an error would be in the log
        assert logged == []


def test_another_site_may_send_nothing(served: Inputs, logged: list[str]) -> None:
    """And the terminal hears nothing of it: uvicorn takes a request that is refused for an error of the server."""
    screen, _, _ = served
    for path in ("/video", "/camera"):
        with opened(screen, path, origin=screen.page.url):
            pass
        with pytest.raises(InvalidStatus) as refused, opened(screen, path, origin="http://evil.example"):
            pass
        answer = refused.value.response
        assert (answer.status_code, answer.body) == (
            403,
            b"this request was made by another page: open this one itself",
        )
    assert logged == []


def test_a_page_that_may_send_nothing(served: Inputs) -> None:
    """Its buttons are those of what the stream takes."""
    with fetch(served[0].page.url) as answer:
        assert 'data-inputs="microphone camera"' in answer.read().decode()
    screen = VideoScreen(HOME, 0, 20, RATE)
    screen.open()
    try:
        with fetch(screen.page.url) as answer:
            assert 'data-inputs=""' in answer.read().decode()
        with opened(screen) as socket:
            send(socket, "audio_begin", rate=48000)
            assert refusal(socket) == "this stream takes no audio from the page: start it with --audio page"
        with pytest.raises(InvalidStatus, match=r"403|404"), opened(screen, "/camera"):
            pass
    finally:
        screen.close()
