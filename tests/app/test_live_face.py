"""A face that talks with a microphone of its page: the audio comes to the stream, which goes on without it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from app.feeds import ImageFeed, LiveFeed, MediaFeed, VideoFeed
from app.image_stream import MAX_SECONDS, StreamControls
from app.job_queue import Job, JobQueue
from app.saved_video import SavedVideo
from app.state import AppState
from app.stream_tab import face_request, live
from app.talking_face import TalkingFaceJob

from .actions import TIMEOUT_MS, press, screenshot, status, tab
from .app_states import client_of, state_of
from .fakes import FakePipeline, FakeWorkers
from .waits import over, until

HERE = {"host": "127.0.0.1:7860"}
LIVE = face_request("a recording that is not read", None, "smile", 5, True)


@pytest.fixture(scope="module")
def state() -> Iterator[AppState]:
    """Of one page for all tests here, which takes a second to build."""
    with closing(state_of()) as found:
        yield found


@pytest.fixture(scope="module")
def client(state: AppState) -> Iterator[TestClient]:
    with client_of(state) as found:
        yield found


class ListeningFace:
    """Stands for StreamingPipeline and its session: a block of grey frames as soon as one is asked for."""

    config = SimpleNamespace(fps=16.0, width=32, height=32)
    audio_ahead, is_over, is_kept_alive = 0.0, False, True

    def __init__(self) -> None:
        self.conditions: dict[str, Any] = {}
        self.heard: list[tuple[torch.Tensor, int]] = []

    def stream(self, prompt: str, **conditions: Any) -> Any:
        self.conditions = conditions
        return self

    def __enter__(self) -> ListeningFace:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        while not self.is_over:
            frames = torch.full((8, 32, 32, 3), 90, dtype=torch.uint8)
            yield SimpleNamespace(frames=frames, audio=torch.zeros(8000), latency=0.1)
            time.sleep(0.01)

    def push_audio(self, samples: torch.Tensor, rate: int) -> None:
        self.heard.append((samples, rate))

    def stop(self) -> None:
        self.is_over = True


class Talking:
    """A live stream of a page, on a face that listens."""

    def __init__(self, queue: JobQueue, saved: Path) -> None:
        self.face, self.controls, self.feed = ListeningFace(), StreamControls(), LIVE.new_feed()
        assert isinstance(self.feed, LiveFeed)
        self.page: LiveFeed = self.feed
        workers: Any = SimpleNamespace(face_stream=lambda: self.face, setup=FakeWorkers(FakePipeline()).setup)
        work = TalkingFaceJob(workers, LIVE, self.controls, self.page, SavedVideo(saved))
        self.job: Job = queue.submit("A", "stream", work.run)


def test_audio_of_the_page_comes_to_the_stream_which_goes_on_without_it(
    queue: JobQueue, state: AppState, client: TestClient, tmp_path: Path
) -> None:
    """The page says what is wrong with the microphone. Its audio: 3 channels at 7 kHz."""
    talking = Talking(queue, tmp_path / "kept.mp4")
    state.feeds.add(talking.page)
    until(lambda: talking.page.status.startswith("no audio from the microphone of the page yet"), "that it is idle")
    with client.websocket_connect(f"/{talking.page.address}/video", headers=HERE) as socket:
        socket.send_json({"type": "audio_begin", "rate": 7000, "channels": 3})
        socket.send_bytes(np.full((140, 3), 8192, "<i2").tobytes())
        until(lambda: talking.face.heard, "the audio")
        until(lambda: re.fullmatch(r"\d+\.\d s", talking.page.status), "a status without a complaint")
    samples, rate = talking.face.heard[0]
    assert (samples.shape, rate, float(samples.min())) == ((3, 140), 7000, 0.25)
    until(lambda: "no audio from the microphone of the page any more" in talking.page.status, "that it has stopped")
    assert client.get(f"/{talking.page.address}/status").json() == {"status": talking.page.status}
    frames = len(talking.page._fragments)
    talking.controls.is_stopped = True
    view = over(talking.job)
    assert (view.state, talking.page.is_over, frames > 0) == ("done", True, True), view.error
    conditions = talking.face.conditions
    assert (conditions["audio"], conditions["seconds"]) == ("live", MAX_SECONDS)
    delivery = conditions["delivery"]
    assert (delivery.pace, delivery.output, delivery.keep_alive) == ("realtime", "skip_to_live", True)


@pytest.mark.parametrize("kind", [ImageFeed, VideoFeed, LiveFeed])
@pytest.mark.parametrize("folder", ["/", "/app/", "/behind/a/proxy/"])
def test_a_stream_is_found_wherever_the_page_is(kind: type[MediaFeed], folder: str) -> None:
    """A proxy may serve the page under a path of its own, which the server does not know."""
    feed = kind()
    source = re.search(r'src="([^"]+)"', live(feed))
    assert source is not None
    path = urljoin(f"http://name{folder}", source[1])
    assert path.rstrip("/") == f"http://name{folder}live/{feed.name}"


def test_only_a_live_stream_has_a_page_and_only_for_its_own_site(client: TestClient, state: AppState) -> None:
    feed, other = LiveFeed(), VideoFeed()
    state.feeds.add(feed)
    state.feeds.add(other)
    assert f'<iframe src="{feed.address}/"' in live(feed)
    assert "<video" in live(other)
    assert 'data-inputs="microphone"' in client.get(f"/{feed.address}/").text
    for name in (other.name, "another"):
        assert client.get(f"/live/{name}/").status_code == 404
        with pytest.raises(WebSocketDenialResponse), client.websocket_connect(f"/live/{name}/video", headers=HERE):
            pass
    foreign = HERE | {"origin": "http://evil.example"}
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(f"/{feed.address}/video", headers=foreign):
        pass
    feed.close()
    assert list(feed.microphone.audio()) == []


def frame_of(page: Page) -> Any:
    """The page of the stream, within that of the app."""
    return page.frame_locator("#stream-window iframe")


def talk(page: Page) -> None:
    """Begin a stream with a live microphone."""
    tab(page, "Stream")
    tab(page, "Talking face")
    page.get_by_label("Talk to it").check()
    expect(page.get_by_label("Seconds (without audio)").first).to_be_hidden()
    press(page, "stream-talk")
    expect(frame_of(page).locator("#status")).to_contain_text("no audio from the microphone", timeout=2 * TIMEOUT_MS)


@pytest.mark.breadth
def test_the_microphone_of_a_browser_and_one_that_stops(opened: Any) -> None:
    """Chromium's own, a beep each second: it is in the video that is saved. The stream goes on when it stops."""
    page = opened(viewport={"width": 1280, "height": 900})
    talk(page)
    frame = page.frames[1]
    frame.evaluate(
        """() => {
          const devices = navigator.mediaDevices, lend = devices.getUserMedia.bind(devices);
          devices.getUserMedia = async (wanted) => (window.lent = await lend(wanted));
        }"""
    )
    frame_of(page).get_by_role("button", name="Use the microphone").click()
    expect(frame_of(page).locator("#status")).to_have_text(re.compile(r"^\d+\.\d s$"), timeout=TIMEOUT_MS)
    frame.wait_for_function("document.querySelector('video').currentTime > 0.5")
    screenshot(page, "face-live")
    frame.evaluate("window.lent.getAudioTracks()[0].dispatchEvent(new Event('ended'))")
    expect(frame_of(page).locator("#status")).to_have_text("the microphone has stopped")
    expect(frame_of(page).get_by_role("button", name="Use the microphone")).to_be_visible()
    seconds = frame.evaluate("document.querySelector('video').currentTime")
    frame.wait_for_function(f"document.querySelector('video').currentTime > {seconds + 1}")  # it goes on
    press(page, "stream-stop")
    expect(page.locator("#stream-facts")).to_contain_text("per second", timeout=TIMEOUT_MS)
    expect(frame_of(page).locator("#status")).to_have_text("the stream has ended")


@pytest.mark.breadth
def test_a_microphone_that_is_not_permitted(opened: Any) -> None:
    """What Chromium raises then: with its own microphone it asks nobody, so that nobody can refuse."""
    page = opened()
    talk(page)
    page.frames[1].evaluate(
        """() => {
          navigator.mediaDevices.getUserMedia = async () => {
            throw new DOMException("Permission denied", "NotAllowedError");
          };
        }"""
    )
    frame_of(page).get_by_role("button", name="Use the microphone").click()
    expect(frame_of(page).locator("#status")).to_have_text("the microphone cannot be used: Permission denied")
    frame = page.frames[1]
    frame.wait_for_function("document.querySelector('video').currentTime > 0.5", timeout=TIMEOUT_MS)
    press(page, "stream-stop")
    expect(status(page, "stream")).to_have_text("Done.", timeout=TIMEOUT_MS)
