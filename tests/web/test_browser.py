"""The pages in a real browser: the video plays with the times it was given, images are visible, the end is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchpar.web.page_input import PageCamera, PageInputs, PageMicrophone
from patchpar.web.server import HOME
from patchpar.web.viewer import ImageScreen, VideoScreen
from tests.app.browser import installed, started
from tests.breadth import first_of
from tests.media.test_video_encoder import RATE, speech
from tests.web.test_pages import until

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or make browser")
PATIENCE = 60_000  # milliseconds, on a busy machine
PLAYS = "document.querySelector('video')?.currentTime > 0.5 && !document.querySelector('video').paused"
LEVEL = """name => {
  const brush = document.createElement("canvas").getContext("2d");
  brush.drawImage(document.querySelector(name), 0, 0, 8, 8);
  return brush.getImageData(4, 4, 1, 1).data[0];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM is not None
    with started(CHROMIUM) as found:
        yield found


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An exception in its script fails the test."""
    errors: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def grey(level: int) -> Tensor:
    return torch.full((8, 64, 96, 3), level, dtype=torch.uint8)


@contextmanager
def visible() -> Iterator[VideoScreen]:
    """A video that goes on until the end of the block, and has done so for 4 s."""
    screen, stop = VideoScreen(HOME, 0, 20, RATE), threading.Event()
    screen.open()
    screen.page.status = "0:03.0, 20.0 frames/s"

    def show(block: int) -> None:
        screen.show(grey(120), block * 0.4, speech(8))

    def go_on() -> None:
        for block in count(10):
            show(block)
            if stop.wait(0.4):
                return

    for block in range(10):
        show(block)
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield screen
    finally:
        stop.set()
        thread.join()
        screen.close()


def test_a_video_plays_while_it_is_made_and_ends(page: Any) -> None:
    """It begins in the middle, with the time that the video has there."""
    with visible() as screen:
        page.goto(screen.page.url)
        page.wait_for_function(PLAYS)
        assert page.evaluate("document.querySelector('video').buffered.start(0)") >= 3.5
        page.wait_for_function(f"Math.abs(({LEVEL})('video') - 120) < 12")
        page.wait_for_function("document.getElementById('status').textContent === '0:03.0, 20.0 frames/s'")
    page.wait_for_function("document.getElementById('status').textContent === 'the stream has ended'")


def test_a_connection_that_is_lost_is_made_again(page: Any) -> None:
    """As of a laptop that has slept: the stream has not ended. Nor has it where its status is not answered once."""
    page.add_init_script(
        "window.sockets = [];"
        "window.WebSocket = class extends WebSocket { constructor(...each) { super(...each); sockets.push(this); } };"
    )
    page.route("**/status", lambda route: route.abort(), times=1)
    with visible() as screen:
        page.goto(screen.page.url)
        page.wait_for_function(PLAYS)
        page.evaluate("document.querySelector('video').muted = false")
        page.evaluate("sockets[0].close()")
        page.wait_for_function(f"sockets.length === 2 && {PLAYS}")
        assert page.evaluate("document.querySelector('video').muted") is False
        page.wait_for_function("document.getElementById('status').textContent === '0:03.0, 20.0 frames/s'")
    page.wait_for_function("document.getElementById('status').textContent === 'the stream has ended'")
    assert page.evaluate("sockets.length") == 2


def test_an_image_is_shown_though_none_follows(page: Any) -> None:
    screen = ImageScreen(HOME, 0, 20)
    screen.open()
    try:
        screen.show(grey(200)[:1], 0.0, None)
        page.goto(screen.page.url, wait_until="domcontentloaded")
        page.wait_for_function(f"document.querySelector('img')?.naturalWidth > 0 && ({LEVEL})('img') > 150")
    finally:
        screen.close()


def test_the_page_sends_its_microphone_and_its_camera(page: Any) -> None:
    """Chromium's own: a beep each second, and a green image. A button switches each on and off."""
    microphone, camera = PageMicrophone(), PageCamera()
    screen = VideoScreen(HOME, 0, 20, RATE, PageInputs(microphone=microphone, camera=camera))
    screen.open()
    try:
        page.goto(screen.page.url)
        page.get_by_role("button", name="Use the microphone").click()
        heard, audio = list[Tensor](), microphone.audio()
        while sum(piece.shape[1] for piece in heard) < 1.5 * 44_100:
            piece, rate = next(audio)
            heard.append(piece)
        assert rate in (44_100, 48_000)
        assert {piece.shape[0] for piece in heard} == {1}
        assert max(piece.shape[1] for piece in heard) < 0.03 * rate
        assert float(torch.cat(heard, 1).abs().max()) > 0.05
        page.get_by_role("button", name="Use the camera").click()
        red, green, _ = np.asarray(next(camera.images())).reshape(-1, 3).mean(0)
        assert green > red + 50
        for name in ("microphone", "camera"):
            page.get_by_role("button", name=f"Stop the {name}").click()
        until(lambda: microphone._sender is None and camera._sender is None, "that both are free")
        microphone.begin(other := object())
        page.get_by_role("button", name="Use the microphone").click()
        page.wait_for_function("document.getElementById('status').textContent.includes('in use by another page')")
        page.get_by_role("button", name="Use the microphone").wait_for()
        microphone.end(other)
    finally:
        screen.close()
    page.wait_for_function("document.querySelectorAll('button').length === 0")


LENDING = """
  const lend = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  window.lent = [];
  navigator.mediaDevices.getUserMedia = async wanted => {
    const stream = await lend(wanted);
    window.lent.push(...stream.getTracks());
    return stream;
  };
"""
"""Notes what the browser has lent to the page."""
FAILURES = {
    "microphone": """
      const send = WebSocket.prototype.send;
      WebSocket.prototype.send = function (data) {
        if (String(data).includes("audio_begin")) throw new Error("it fails here");
        return send.call(this, data);
      };
    """,
    "camera": """
      const play = HTMLMediaElement.prototype.play;
      HTMLMediaElement.prototype.play = function () {
        return this.srcObject ? Promise.reject(new Error("it fails here")) : play.call(this);
      };
    """,
}


@pytest.mark.parametrize("name", first_of(FAILURES, "microphone"))
def test_what_cannot_be_sent_is_given_back(page: Any, name: str) -> None:
    """Otherwise the microphone would stay on, with nothing on the page that says so or switches it off."""
    inputs = PageInputs(microphone=PageMicrophone(), camera=PageCamera())
    screen = VideoScreen(HOME, 0, 20, RATE, inputs)
    screen.open()
    page.add_init_script(LENDING + FAILURES[name])
    try:
        page.goto(screen.page.url)
        page.get_by_role("button", name=f"Use the {name}").click()
        page.wait_for_function(f"line.textContent === 'the {name} cannot be used: it fails here'")
        page.get_by_role("button", name=f"Use the {name}").wait_for()
        assert page.evaluate("window.lent.map(each => each.readyState)") == ["ended"]
    finally:
        screen.close()


def test_a_microphone_that_is_stopped_while_it_begins_is_off(page: Any) -> None:
    screen = VideoScreen(HOME, 0, 20, RATE, PageInputs(microphone=PageMicrophone()))
    screen.open()
    page.add_init_script(LENDING)
    try:
        page.goto(screen.page.url)
        page.evaluate("document.getElementById('microphone').click(), document.getElementById('microphone').click()")
        page.wait_for_function("window.lent.length === 1")
        page.get_by_role("button", name="Use the microphone").wait_for()
        page.wait_for_function("window.lent[0].readyState === 'ended'")
    finally:
        screen.close()
