"""A stream in a browser: what its page fetches, from this machine only; a slow watcher costs nobody anything."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from inspect import signature
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from patchpar.errors import PlanError
from patchpar.media.mp4_fragments import Mp4Fragment, Mp4Header
from patchpar.web import frame_player, port_protocol
from patchpar.web import viewer as screen_module
from patchpar.web.feed import BOUNDARY, VideoFeed
from patchpar.web.frame_player import FramePlayer
from patchpar.web.server import HOME, WebServer, names_of
from patchpar.web.viewer import KEPT, ImageScreen, VideoScreen
from tests.media.test_video_encoder import RATE, frames, speech


@pytest.fixture
def images() -> Iterator[ImageScreen]:
    screen = ImageScreen(HOME, 0, fps=50)
    screen.open()
    yield screen
    screen.close()


@pytest.fixture
def video_screen() -> Iterator[VideoScreen]:
    screen = VideoScreen(HOME, 0, 20, RATE)
    screen.open()
    yield screen
    screen.close()


def fetch(url: str, **headers: str) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20)


def jpegs(answer: Any) -> Iterator[float]:
    """Mean levels of images as they come, until the end."""
    while line := answer.readline():
        if line.lower().startswith(b"content-length"):
            size = int(line.split(b":")[1])
            answer.readline()
            yield float(np.asarray(Image.open(io.BytesIO(answer.read(size)))).mean())
            assert answer.readline() == b"\r\n"  # behind the image; then comes the boundary


def watching(screen: VideoScreen, **options: Any) -> ClientConnection:
    url = screen.page.url.replace("http", "ws") + "/video"
    return connect(url, open_timeout=20, close_timeout=0.5, max_size=None, **options)


def until(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within 20 s"
        time.sleep(0.01)


def test_images_follow_one_another(images: ImageScreen) -> None:
    """The last one is there for whoever comes."""
    images.show(frames(10, 1), 0.0, None)
    until(lambda: images.page.feed.count == 1, "a picture")  # type: ignore[attr-defined]
    with fetch(f"{images.page.url}/images") as answer:
        assert answer.headers["Content-Type"] == f"multipart/x-mixed-replace; boundary={BOUNDARY}"
        seen = jpegs(answer)
        assert next(seen) == pytest.approx(10, abs=2)
        for before, level in ((10, 50), (50, 200)):
            images.show(frames(level, 1), 0.0, None)
            assert next(value for value in seen if abs(value - before) > 2) == pytest.approx(level, abs=2)
        images.close()
        assert list(seen)[-1] == pytest.approx(200, abs=2)


def test_all_frames_are_sent_before_the_page_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, sent = ImageScreen(HOME, 0, fps=50), list[int]()
    screen.open()
    screen.show(frames(10, 9), 0.0, None)
    with monkeypatch.context() as patch:
        patch.setattr(screen.page, "close", lambda: sent.append(screen.page.feed.count))  # type: ignore[attr-defined]
        screen.close()
    screen.close()
    assert sent == [9]


def test_two_see_the_same_video_with_its_audio(video_screen: VideoScreen) -> None:
    """What comes over the socket decodes to the frames that were shown, the last one included."""

    def receive(watcher: ClientConnection) -> tuple[str, bytes]:
        word, data = json.loads(watcher.recv(20)), b""
        assert word["type"] == "media_init"
        while isinstance(part := watcher.recv(20), bytes):
            data += part
        assert json.loads(part) == {"type": "media_end"}
        return word["mime"], data

    found: list[tuple[str, bytes]] = []
    with watching(video_screen) as one, watching(video_screen) as two:
        until(lambda: video_screen.page.feed.watchers == 2, "two watchers")
        threads = [threading.Thread(target=lambda each=each: found.append(receive(each))) for each in (one, two)]
        for thread in threads:
            thread.start()
        for block in range(4):
            video_screen.show(frames(60 * block), block * 0.2, speech())
        video_screen.close()
        for thread in threads:
            thread.join(20)
    assert len(found) == 2
    for mime, data in found:
        assert mime == 'video/mp4; codecs="avc1.64000a, mp4a.40.2"'
        with av.open(io.BytesIO(data)) as container:
            levels = [float(frame.to_ndarray(format="rgb24").mean()) for frame in container.decode(video=0)]
        assert levels == pytest.approx([60 * (number // 4) for number in range(16)], abs=12)
        with av.open(io.BytesIO(data)) as container:
            assert sum(frame.samples for frame in container.decode(audio=0)) >= 0.8 * 48000 - 100, "to the end"


def test_who_comes_late_begins_with_a_frame_that_needs_no_other(video_screen: VideoScreen) -> None:
    for block in range(10):
        video_screen.show(frames(20 * block), block * 0.2, speech())
    with watching(video_screen) as watcher:
        watcher.recv(20)
        data = b"".join(watcher.recv(20) for _ in range(2))
    with av.open(io.BytesIO(data)) as container:
        first = next(container.decode(video=0))
    assert float(first.time) == pytest.approx(1.6, abs=0.01)
    assert float(first.to_ndarray(format="rgb24").mean()) == pytest.approx(160, abs=12)


def test_a_watcher_who_reads_nothing_costs_no_memory_and_no_time(video_screen: VideoScreen) -> None:
    """Far more than sockets hold. It misses the middle; one beside it, who reads, misses nothing."""
    feed, size = video_screen.page.feed, 2**19
    assert isinstance(feed, VideoFeed)
    received: list[bytes | str] = []
    at_once = {"max_queue": 1} if "max_queue" in signature(ClientConnection).parameters else {}  # before 14 it is one
    with watching(video_screen, **at_once) as slow, watching(video_screen) as quick:
        until(lambda: feed.watchers == 2, "two watchers")
        for number in range(100):
            feed.put(Mp4Header(mime="video/mp4", data=b"head"), [Mp4Fragment(data=bytes([number]) * size, is_key=True)])
            assert sum(len(each.data) for each in feed._fragments) <= KEPT * size
            received += [quick.recv(20) for _ in range(1 if received else 3)]
        assert [part[0] for part in received[2:]] == list(range(100))
        assert json.loads(slow.recv(20))["type"] == "media_init"
        video_screen.page.feed.close()
        seen = [part[0] for part in slow if isinstance(part, bytes)][1:]
    assert seen[-1] == 99
    assert len(seen) < 100


def test_a_watcher_who_goes_is_forgotten_though_nothing_comes(video_screen: VideoScreen) -> None:
    with watching(video_screen) as watcher:
        until(lambda: video_screen.page.feed.watchers == 1, "a watcher")
        watcher.send("anything")
    until(lambda: video_screen.page.feed.watchers == 0, "nobody")


def test_the_page_and_what_it_says(images: ImageScreen, video_screen: VideoScreen) -> None:
    for screen, kind in ((images, "images"), (video_screen, "video")):
        with fetch(screen.page.url) as answer:
            assert f'data-kind="{kind}"' in answer.read().decode()
        screen.page.status = "degraded"
        with fetch(f"{screen.page.url}/status") as answer:
            assert json.load(answer) == {"status": "degraded"}


def test_only_this_machine_is_answered(images: ImageScreen, video_screen: VideoScreen) -> None:
    """A page of somebody else's, or a name of theirs that leads here, must not see what is shown."""
    assert images.page.url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        fetch(images.page.url, Host="evil.example")
    with fetch(images.page.url, Host="[::1]:7860") as answer:
        assert answer.status == 200
    with watching(video_screen, origin=video_screen.page.url):
        pass
    with pytest.raises(InvalidStatus, match="403"), watching(video_screen, origin="http://evil.example"):
        pass
    assert names_of("0.0.0.0") == ["*"]
    assert names_of(HOME) == names_of("::1") == ["localhost", HOME, "[::1]"]
    assert names_of("127.0.0.2") == [*names_of(HOME), "127.0.0.2"]  # its own address, which it prints


def test_images_are_not_sent_to_another_site(images: ImageScreen) -> None:
    """An <img> of a page has no Origin, but says from which site it is; players of videos send neither."""
    images.show(frames(10, 1), 0.0, None)
    url = f"{images.page.url}/images"
    for own in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Origin": images.page.url}):
        with fetch(url, **own) as answer:
            assert next(jpegs(answer)) == pytest.approx(10, abs=2)
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    evil = {"Origin": "http://evil.example"}
    for foreign in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, evil):
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            fetch(url, **foreign)
        assert refused.value.read() == b"this request was made by another page: open this one itself"


def test_another_site_shows_no_page_in_a_frame(images: ImageScreen, video_screen: VideoScreen) -> None:
    """Whoever clicks there would switch on the microphone here."""
    for screen in (images, video_screen):
        with fetch(screen.page.url) as answer:
            assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'self'"


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.socket() as other:
        other.bind((HOME, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PlanError, match=f"127.0.0.1:{port} cannot be used: Address already in use; .* --mjpeg 0"):
            ImageScreen(HOME, port, 20)
    WebServer(HOME, port, "--port").close()
    with pytest.raises(PlanError, match="--ws 70000: it must be a number from 1 to 65535"):
        VideoScreen(HOME, 70000, 20, None)


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "websockets"])
def test_what_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(PlanError, match=rf"--ws needs {missing}: pip install 'patchpar\[serve\]'"):
        VideoScreen(HOME, 0, 20, None)


@pytest.mark.parametrize("lingers", [True, False])
def test_browsers_that_fetch_the_rest_are_waited_for_and_not_for_ever(
    lingers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen_module, "LINGER_SECONDS", 60.0 if lingers else 0.05)
    screen = ImageScreen(HOME, 0, fps=50)
    screen.open()
    screen.page.feed.watchers += 1
    closing_it = threading.Thread(target=screen.close)
    closing_it.start()
    if lingers:
        closing_it.join(2.0)
        assert closing_it.is_alive()
        screen.page.feed.watchers -= 1
    closing_it.join(20)
    assert not closing_it.is_alive()


def test_a_page_that_was_never_opened_is_closed() -> None:
    """As where the model cannot be loaded."""
    for screen in (ImageScreen(HOME, 0, 20), VideoScreen(HOME, 0, 20, None)):
        for _ in range(2):
            screen.close()
        assert screen.page._port._socket.fileno() == -1


def test_frames_are_played_in_their_order_one_by_one_and_the_oldest_go() -> None:
    """A block that comes while another plays: a second of frames, or two blocks, may wait."""
    played, first, go = [], threading.Event(), threading.Event()

    def put(frame: Tensor) -> None:
        played.append(int(frame))
        first.set()
        assert go.wait(20)

    player = FramePlayer(put, fps=10_000)
    player.start()
    player.add(torch.arange(1))
    assert first.wait(20)
    player.add(torch.arange(1, 700))
    player.add(torch.arange(700, 1500))
    go.set()
    player.close()
    assert played == [0, *range(1, 1500)]
    go.clear()
    slow = FramePlayer(played.append, fps=10)
    for block in range(5):
        slow.add(torch.arange(4 * block, 4 * block + 4))
    assert [int(frame) for frame in slow._waiting] == list(range(10, 20))
    live = FramePlayer(played.append, fps=10, slack=1)
    for block in range(5):
        live.add(torch.arange(4 * block, 4 * block + 4))
    assert [int(frame) for frame in live._waiting] == [15, 16, 17, 18, 19]


def test_frames_that_are_due_in_an_hour_hold_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_player, "CLOSE_SECONDS", 0.1)
    for drops in (False, True):
        played = list[Tensor]()
        player = FramePlayer(played.append, fps=1 / 3600)
        player.start()
        player.add(torch.zeros(3))
        until(lambda played=played: played, "the first frame")  # type: ignore[misc]
        began = time.monotonic()
        player.close(drops=drops)
        player._thread.join(5)
        assert not player._thread.is_alive()
        assert (len(played), time.monotonic() - began < 5) == (1, True)


def test_frames_are_played_by_the_clock() -> None:
    """Whatever the burst. One that was late by less than a period is followed at its own time."""
    times = []
    player = FramePlayer(lambda frame: times.append(time.monotonic()), fps=50)
    player.start()
    player.add(torch.zeros(10))
    player.close()
    assert len(times) == 10
    assert times[-1] - times[0] > 8 / 50 - 0.005


def test_a_late_frame_delays_those_after_it_and_one_that_is_little_late_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was missed is not played in a burst, at 10 frames a second that take these times to be put."""
    now, dues, takes = [100.0], list[float](), iter([0.0, 0.5, 0.0, 0.15, 0.0, 0.0])

    def sleep_until(due: float) -> bool:
        dues.append(round(due - 100, 6))
        now[0] = max(now[0], due)
        return True

    def put(frame: Tensor) -> None:
        now[0] += next(takes)

    player = FramePlayer(put, fps=10)
    player.add(torch.zeros(6))
    monkeypatch.setattr(frame_player, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(player, "_sleep_until", sleep_until)
    player._is_over = True
    player._play()
    assert dues == [0.0, 0.1, 0.6, 0.7, 0.8, 0.9]


def test_the_head_of_a_request_comes_in_time_and_is_not_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody who reaches the port can begin one. What has begun in time goes on for as long as it takes."""
    monkeypatch.setattr(port_protocol, "HEAD_SECONDS", 0.2)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
        await asyncio.sleep(1)
        if scope["type"] == "websocket":
            await send({"type": "websocket.send", "text": "late"})
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with closing(WebServer(HOME, 0, "--port")) as server:
        server.serve(application)
        address = (HOME, int(server.url.rpartition(":")[2]))
        whole = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        for head in (b"", b"GET / HTTP/1.1\r\n", whole + b"GET /"):
            with socket.create_connection(address, 20) as link:
                link.sendall(head)
                found = b"".join(iter(lambda link=link: link.recv(1 << 10), b""))  # type: ignore[misc]
                assert found.startswith(b"HTTP/1.1 204") is head.startswith(whole)
        with socket.create_connection(address, 20) as link:
            for _ in range(2):
                link.sendall(whole)
                assert b" 204 " in link.recv(1 << 10)
        with connect(server.url.replace("http", "ws")) as watched:
            assert watched.recv(timeout=20) == "late"
        monkeypatch.setattr(port_protocol, "HEAD_SECONDS", 20.0)
        with socket.create_connection(address, 20) as link, suppress(ConnectionError):
            link.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * (1 << 20))
            assert b" 400 " in link.recv(1 << 10)
