"""A stream by WebRTC, with a client of aiortc in the same process: frames and audio out, audio and images in."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import av
import numpy as np
import pytest
import torch
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from patchpar.errors import PlanError
from patchpar.web import viewer, webrtc
from patchpar.web.page_input import PageCamera, PageInputs, PageMicrophone
from patchpar.web.server import HOME
from patchpar.web.viewer import VideoScreen
from patchpar.web.webrtc import AUDIO_RATE, AUDIO_SAMPLES, FrameTrack, OutgoingAudio
from tests.app.browser import installed, started
from tests.media.test_video_encoder import RATE
from tests.web.test_browser import LEVEL
from tests.web.test_pages import fetch, until

FPS, SIDE = 20, 64
CHROMIUM = installed()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[VideoScreen, PageMicrophone, PageCamera]]:
    microphone, camera = PageMicrophone(), PageCamera()
    inputs = PageInputs(microphone=microphone, camera=camera)
    screen = VideoScreen(HOME, 0, FPS, RATE, inputs, webrtc=True)
    screen.open()
    yield screen, microphone, camera
    screen.close()


class Generated(MediaStreamTrack):
    """A loud tone, or red images."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self._count = kind, 0

    async def recv(self) -> Any:
        await asyncio.sleep(0.02)
        self._count += 1
        if self.kind == "video":
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), (220, 0, 0), np.uint8), format="rgb24")
            frame.pts, frame.time_base = self._count * 1800, Fraction(1, 90_000)
            return frame
        tone = np.sin(np.arange(AUDIO_SAMPLES) * 0.1 + self._count * 96) * 16000
        sample = av.AudioFrame.from_ndarray(tone.astype(np.int16)[None], format="s16", layout="mono")
        sample.sample_rate, sample.pts = AUDIO_RATE, self._count * AUDIO_SAMPLES
        sample.time_base = Fraction(1, AUDIO_RATE)
        return sample


def post(url: str, data: bytes | Iterator[bytes], **headers: str) -> Any:
    request = urllib.request.Request(f"{url}/webrtc", data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def refusal(url: str, data: bytes | Iterator[bytes], **headers: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(url, data, **headers)
    return raised.value.code, json.load(raised.value)["message"]


async def connected(url: str, *, sends: bool) -> tuple[RTCPeerConnection, dict[str, Any], list[str]]:
    """A client that watches, and sends what it can if `sends`: it, its tracks, and the notes that it gets."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    tracks: dict[str, Any] = {}
    notes: list[str] = []
    peer.on("track", lambda track: tracks.update({track.kind: track}))
    peer.createDataChannel("notes").on("message", notes.append)
    for kind in ("audio", "video"):
        peer.addTransceiver(Generated(kind) if sends else kind, direction="sendrecv" if sends else "recvonly")
    await peer.setLocalDescription(await peer.createOffer())
    offer = {"type": peer.localDescription.type, "sdp": peer.localDescription.sdp}
    answer = await asyncio.to_thread(post, url, json.dumps(offer).encode())
    await peer.setRemoteDescription(RTCSessionDescription(**answer))
    return peer, tracks, notes


def streaming(screen: VideoScreen, stop: threading.Event) -> None:
    """Blocks of 0.2 s, grey, with a tone."""
    number = 0
    while not stop.wait(0.2):
        samples = torch.sin(torch.arange(RATE // 5) * 0.3) * 0.5
        screen.show(torch.full((4, SIDE, SIDE, 3), 120, dtype=torch.uint8), number * 0.2, samples)
        number += 1


def test_frames_and_audio_go_both_ways(served: tuple[VideoScreen, PageMicrophone, PageCamera]) -> None:
    """And while one page sends, another gets a note that it cannot."""
    screen, microphone, camera = served
    stop = threading.Event()
    thread = threading.Thread(target=streaming, args=(screen, stop))
    thread.start()

    async def watch() -> None:
        peer, tracks, _ = await connected(screen.page.url, sends=True)
        levels = [float((await tracks["video"].recv()).to_ndarray(format="rgb24").mean()) for _ in range(5)]
        assert levels[-1] == pytest.approx(120, abs=12)
        heard = [np.abs((await tracks["audio"].recv()).to_ndarray()).max() for _ in range(30)]
        assert max(heard) > 8000
        image = await asyncio.to_thread(next, camera.images())
        red, green, blue = np.asarray(image).reshape(-1, 3).mean(0)
        assert red > 150 > 60 > max(green, blue)
        pieces = microphone.audio()
        loud = [float((await asyncio.to_thread(next, pieces))[0].abs().max()) for _ in range(10)]
        assert max(loud) > 0.3
        other, _, notes = await connected(screen.page.url, sends=True)
        while len(notes) < 2:
            await asyncio.sleep(0.05)
        assert {json.loads(word)["message"].split(" of")[0] for word in notes} == {"the microphone", "the camera"}
        await other.close()
        await peer.close()

    try:
        asyncio.run(asyncio.wait_for(watch(), 60))
    finally:
        stop.set()
        thread.join()
    until(lambda: microphone._sender is None and camera._sender is None, "that both are free")
    until(lambda: screen._peers.watchers == 0, "that nobody watches")


@pytest.mark.breadth  # the same as the client above, in Chromium
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or make browser")
def test_the_page_in_a_browser(served: tuple[VideoScreen, PageMicrophone, PageCamera]) -> None:
    """It plays, and sends the microphone and the camera of Chromium; both can be stopped."""
    screen, microphone, camera = served
    stop = threading.Event()
    thread = threading.Thread(target=streaming, args=(screen, stop))
    thread.start()
    assert CHROMIUM is not None
    try:
        with started(CHROMIUM) as browser:
            page = browser.new_page()
            page.set_default_timeout(60_000)
            page.goto(screen.page.url)
            page.wait_for_function("document.querySelector('video')?.currentTime > 0.5")
            page.wait_for_function(f"Math.abs(({LEVEL})('video') - 120) < 12")
            for name in ("microphone", "camera"):
                page.get_by_role("button", name=f"Use the {name}").click()
            red, green, _ = np.asarray(next(camera.images())).reshape(-1, 3).mean(0)
            assert green > red + 50
            pieces = microphone.audio()
            assert max(float(next(pieces)[0].abs().max()) for _ in range(80)) > 0.05
            for name in ("microphone", "camera"):
                page.get_by_role("button", name=f"Stop the {name}").click()
            until(lambda: microphone._sender is None and camera._sender is None, "that both are free")
    finally:
        stop.set()
        thread.join()


def test_offers_that_are_refused(
    served: tuple[VideoScreen, PageMicrophone, PageCamera], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = served[0].page.url
    assert refusal(url, b"{}", Origin="http://evil.example")[0] == 403
    assert refusal(url, b"{}") == (400, "that is no offer: send {'type': 'offer', 'sdp': ...} in JSON")
    assert refusal(url, b'{"type": "offer", "sdp": "v=0"}')[0] == 400
    too_large = (413, "an offer has at most 65536 bytes")
    assert refusal(url, b" " * 70_000) == too_large
    assert refusal(url, iter([b" " * 70_000])) == too_large  # also one whose length is not declared
    with closing(
        HTTPConnection(HOME, urlsplit(url).port, timeout=20)
    ) as link:  # nor one whose length is declared wrong
        both = {"Content-Length": "2", "Transfer-Encoding": "chunked"}
        link.request("POST", "/webrtc", b"%x\r\n%s\r\n0\r\n\r\n" % (70_000, b" " * 70_000), both)
        assert link.getresponse().status == 413
    assert refusal(url, iter([b"{}"]))[0] == 400
    monkeypatch.setattr(webrtc, "MAX_PEERS", 0)
    assert refusal(url, b"{}") == (400, "0 browsers watch by WebRTC, and that is the limit: watch at ?mse")
    with fetch(url) as answer:
        assert 'data-kind="webrtc"' in answer.read().decode()


def test_offers_that_come_at_once_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up the addresses of an offer takes a while, in which others would pass the limit."""
    closed = list[Any]()

    class Slow:
        def __init__(self, _: Any) -> None:
            self.getTransceivers = list

        async def setRemoteDescription(self, _: Any) -> None:
            await asyncio.sleep(0.01)

        async def close(self) -> None:
            closed.append(self)

    async def two() -> list[str]:
        offer = b'{"type": "offer", "sdp": "v=0"}'
        answers = [peers.answer(offer) for _ in range(2)]
        return [str(found) for found in await asyncio.gather(*answers, return_exceptions=True)]

    monkeypatch.setattr(webrtc, "RTCPeerConnection", Slow)
    monkeypatch.setattr(webrtc, "MAX_PEERS", 1)
    peers = webrtc.RtcPeers(FPS, None, PageInputs())
    with closing(peers):
        limit = "1 browsers watch by WebRTC, and that is the limit: watch at ?mse"
        assert asyncio.run(two()) == ["that offer takes no video", limit]
    assert len(closed) == 1, "one that is refused is closed"


class Answered:
    """Stands for a browser that has got an answer, and for one that has connected too."""

    localDescription = SimpleNamespace(type="answer", sdp="")

    def __init__(self) -> None:
        self.connectionState, self.is_closed = "connecting", False
        self.getTransceivers = lambda: [SimpleNamespace(kind="video", receiver=SimpleNamespace(track=None))]
        self.on = lambda event, function=None: lambda function: function
        self.addTrack = self.on
        self.setRemoteDescription = self.setLocalDescription = self.createAnswer = self._nothing

    async def _nothing(self, *_: Any) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


def test_a_browser_that_does_not_connect_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a page that is reloaded at once. One that has connected stays until the end, which it is told."""
    browsers = [Answered() for _ in range(3)]
    waiting = iter(browsers)
    offer = b'{"type": "offer", "sdp": "v=0"}'

    async def three() -> tuple[list[bool], list[bool]]:
        for _ in range(2):
            await peers.answer(offer)
        browsers[1].connectionState = "connected"
        while peers.watchers > 1:
            await asyncio.sleep(0.01)
        await peers.answer(offer)
        closed = [browser.is_closed for browser in browsers]
        await asyncio.to_thread(peers.close)
        return closed, [browser.is_closed for browser in browsers]

    monkeypatch.setattr(webrtc, "RTCPeerConnection", lambda _: next(waiting))
    monkeypatch.setattr(webrtc, "JOIN_SECONDS", 0.05)
    monkeypatch.setattr(webrtc, "MAX_PEERS", 2)
    peers = webrtc.RtcPeers(FPS, None, PageInputs())
    with closing(peers):
        assert asyncio.run(asyncio.wait_for(three(), 20)) == ([True, False, False], [True] * 3)


@pytest.mark.parametrize("direction", ["sendrecv", "recvonly"])
def test_nothing_goes_on_for_a_browser_that_has_left(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it has never connected, nor where it sends nothing to a stream that takes its inputs."""
    errors = list[dict[str, Any]]()
    monkeypatch.setattr(webrtc, "JOIN_SECONDS", 0.05)
    monkeypatch.setattr(webrtc, "QUIET_SECONDS", 0.05)
    peers = webrtc.RtcPeers(FPS, RATE, PageInputs(microphone=PageMicrophone(), camera=PageCamera()))

    async def come_and_leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        browser = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        for kind in ("audio", "video"):
            browser.addTransceiver(kind, direction=direction)
        await browser.setLocalDescription(await browser.createOffer())
        offer = {"type": browser.localDescription.type, "sdp": browser.localDescription.sdp}
        await peers.answer(json.dumps(offer).encode())
        await browser.close()
        while peers.watchers or peers._tasks:
            await asyncio.sleep(0.01)
        gc.collect()  # asyncio reports the error of a task that is forgotten

    with closing(peers):
        asyncio.run(asyncio.wait_for(come_and_leave(), 20))
    assert errors == []


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "find_spec", lambda name: None if name == "aiortc" else name)
    with pytest.raises(PlanError, match=r"--webrtc needs aiortc: pip install 'patchpar\[rtc\]'"):
        VideoScreen(HOME, 0, FPS, RATE, webrtc=True)


def test_audio_comes_by_the_clock_and_what_is_late_is_dropped() -> None:
    """Silence where there is none; of more than a block and a quarter of a second the oldest go."""

    async def heard() -> list[int]:
        track = OutgoingAudio()
        found = [int((await track.recv()).to_ndarray().max())]
        for value in range(1, 11):
            track.put(np.full(AUDIO_RATE // 5, value, np.int16))
        found += [int((await track.recv()).to_ndarray().max()) for _ in range(24)]
        return found

    found = asyncio.run(heard())
    assert found == [0, 8, 8, *[9] * 10, *[10] * 10, 10, 0]


def test_frames_of_too_many_pixels_are_no_images() -> None:
    """A few kilobytes of video have frames of a gigabyte. Who sends them is told once."""
    camera, messages = PageCamera(), list[str]()
    frames = [SimpleNamespace(width=side, height=side, to_image=lambda side=side: side) for side in (16000, 16000, 64)]

    async def recv() -> Any:
        if not frames:
            raise webrtc.MediaStreamError
        return frames.pop(0)

    track = SimpleNamespace(kind="video", recv=recv)
    asyncio.run(webrtc._receive(track, camera, [SimpleNamespace(send=messages.append)]))
    camera.close()
    assert list(camera.images()) == [64]
    assert [json.loads(word)["message"] for word in messages] == [
        "the image has 16000 x 16000 pixels: at most 17 million are taken, so make it smaller"
    ]


class Clock:
    """Stands for `time` and `asyncio` of the module: `now` goes on when something sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = list[float]()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += max(0.0, seconds)


def test_audio_is_sent_whole_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any length, as many as there are; packets are 20 ms apart, and say when they begin."""
    clock = Clock()
    monkeypatch.setattr(webrtc, "time", clock)
    monkeypatch.setattr(webrtc, "asyncio", clock)
    samples = (np.arange(40 * AUDIO_SAMPLES) % 30_000 + 1).astype(np.int16)

    async def sent() -> list[Any]:
        track, found, begin = OutgoingAudio(), [], 0
        for number in range(40):
            length = 700 if number % 2 else 2 * AUDIO_SAMPLES - 700
            track.put(samples[begin : begin + length])
            begin += length
            found.append(await track.recv())
        return [*found, await track.recv()]

    *packets, last = asyncio.run(sent())
    assert np.array_equal(np.concatenate([packet.to_ndarray()[0] for packet in packets]), samples)
    assert last.to_ndarray().max() == 0
    assert [packet.pts for packet in [*packets, last]] == [number * AUDIO_SAMPLES for number in range(41)]
    assert clock.slept == pytest.approx([0.0, *[AUDIO_SAMPLES / AUDIO_RATE] * 40])


def test_a_frame_is_sent_once_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding it again and again would take a core for each browser."""
    clock = Clock()
    monkeypatch.setattr(webrtc, "time", clock)

    async def sent() -> tuple[Any, bool, Any]:
        track = FrameTrack()
        track.put(np.full((SIDE, SIDE, 3), 10, np.uint8))
        first = await track.recv()
        waiting = asyncio.create_task(track.recv())
        for _ in range(5):
            await asyncio.sleep(0)
        is_sent_again = waiting.done()
        clock.now += 0.5
        track.put(np.full((SIDE, SIDE, 3), 200, np.uint8))
        return first, is_sent_again, await waiting

    first, is_sent_again, second = asyncio.run(sent())
    assert not is_sent_again
    assert [frame.to_ndarray(format="rgb24").mean() for frame in (first, second)] == [10, 200]
    assert (second.pts - first.pts) * second.time_base == Fraction(1, 2)


def test_audio_at_its_loudest_does_not_wrap_around() -> None:
    """1.0 is one more than the largest sample of 16 bits."""
    sent = list[Any]()
    with closing(webrtc.RtcPeers(FPS, AUDIO_RATE, PageInputs())) as peers:
        peers._peers[object()] = (FrameTrack(), None)
        peers._loop = SimpleNamespace(call_soon_threadsafe=lambda _, x: sent.append(x), is_running=lambda: False)  # type: ignore[assignment]
        peers.add(torch.zeros(0, SIDE, SIDE, 3, dtype=torch.uint8), torch.tensor([1.0, -1.0, 0.5, 2.0]))
    assert sent[0].tolist() == [32767, -32768, 16384, 32767]


def test_an_input_that_is_quiet_is_free_and_a_refusal_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the input has been taken in between."""
    monkeypatch.setattr(webrtc, "QUIET_SECONDS", 0.05)
    camera, other, notes = PageCamera(), object(), list[str]()
    frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")

    async def watch() -> list[int]:
        waiting: asyncio.Queue[Any] = asyncio.Queue()
        track: Any = SimpleNamespace(kind="video", recv=waiting.get)
        receiving = asyncio.create_task(webrtc._receive(track, camera, [SimpleNamespace(send=notes.append)]))

        async def send(count: int) -> int:
            for _ in range(count):
                waiting.put_nowait(frame)
            while not waiting.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            return len(notes)

        camera.begin(other)
        counts = [await send(3)]
        camera.end(other)
        counts.append(await send(1))
        while camera._sender is not None:  # it is quiet now
            await asyncio.sleep(0.01)
        camera.begin(other)
        counts.append(await send(2))
        receiving.cancel()
        return counts

    assert asyncio.run(asyncio.wait_for(watch(), 20)) == [1, 1, 2]
