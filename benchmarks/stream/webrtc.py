"""Seconds from glass to glass: from an image before a camera, or from the stream, to the image on a screen.

    python -m benchmarks.stream.webrtc --write docs/figures/stream-webrtc.md

A scene turns from dark to bright and back. On the first row a client of aiortc in this process sends it as its camera
by WebRTC to a stream whose ranks sleep and give back what came, and watches that stream. On the other rows the stream
turns, and a page in a Chromium without a window watches it, by WebRTC and by MSE. All on this machine's loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from benchmarks.page import publish
from patchpar.stream.delivery import StreamDelivery, StreamFormat
from patchpar.stream.live_inputs import Camera, LiveFrames
from patchpar.stream.messages import BlockReady, CancelStream, EndStream, ProducedBlock, StreamRun
from patchpar.stream.session import StreamSession
from patchpar.stream.video_source import FrameSources, LiveVideo
from patchpar.web.page_input import PageCamera, PageInputs
from patchpar.web.server import HOME
from patchpar.web.viewer import VideoScreen
from tests.app.browser import installed, started

FPS, SIDE, FRAMES = 20, 128, 4
FORMAT = StreamFormat(fps=FPS, height=SIDE, width=SIDE, frames=2, per_latent=2)
BLOCK = FRAMES / FPS
"""Seconds of a block: so long it waits for the last of its frames."""
STEP = 0.05
"""Seconds that the ranks take for a block."""
DARK, BRIGHT = 40, 200
TURN_SECONDS = 1.7
"""Between two turns of the scene; no multiple of a block."""
CAMERA_FPS = 30
SEEN = """() => {
  const video = document.querySelector("video"), brush = document.createElement("canvas").getContext("2d");
  window.turns = [];
  let bright = null;
  const look = () => {
    brush.drawImage(video, 0, 0, 8, 8);
    const now = brush.getImageData(4, 4, 1, 1).data[0] > 120;
    if (bright !== null && now !== bright) window.turns.push(Date.now() / 1000);
    bright = now;
    requestAnimationFrame(look);
  };
  look();
}"""


class Scene:
    """Dark and bright in turn. `turns`: when it turned, on the clock of time.time."""

    def __init__(self) -> None:
        self.turns: list[float] = []
        self._next = time.time() + TURN_SECONDS
        self._is_bright = False

    def level(self) -> int:
        """The level of all pixels now."""
        now = time.time()
        if now >= self._next:
            self._is_bright = not self._is_bright
            self.turns.append(now)
            self._next = now + TURN_SECONDS
        return BRIGHT if self._is_bright else DARK


class SceneCamera(MediaStreamTrack):
    """The scene, as a camera sends it."""

    kind = "video"

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._scene, self._count = scene, 0

    async def recv(self) -> Any:
        """Return the next image, as aiortc asks for it."""
        await asyncio.sleep(1 / CAMERA_FPS)
        self._count += 1
        frame = av.VideoFrame.from_ndarray(np.full((SIDE, SIDE, 3), self._scene.level(), np.uint8), format="rgb24")
        frame.pts, frame.time_base = self._count * 90_000 // CAMERA_FPS, Fraction(1, 90_000)
        return frame


class EchoingRanks:
    """Ranks that sleep for each block and give back the frames that came."""

    def run(
        self, course: StreamRun, on_event: Callable[[int, Any], None], on_start: Callable[[Any], None]
    ) -> list[Any]:
        """Run a stream, see StreamDriver."""
        orders: queue.Queue[Any] = queue.Queue()
        on_start(lambda rank, order: orders.put(order) if rank == 0 else None)
        block = course.first_block
        while True:
            on_event(0, BlockReady(block=block))
            order = orders.get()
            if isinstance(order, (EndStream, CancelStream)):
                return []
            time.sleep(STEP)
            on_event(1, ProducedBlock(block=block, frames=order.frames, seconds=STEP, sink=None))
            block += 1


def delays(turns: Sequence[float], seen: Sequence[float]) -> list[float]:
    """Seconds from each turn to the first one seen after it, and before the next. What was not seen is left out."""
    found = []
    for begin, end in zip(turns, [*turns[1:], float("inf")], strict=True):
        found += [at - begin for at in seen if begin <= at < end][:1]
    return found


async def client(url: str, scene: Scene, count: int) -> list[float]:
    """Send the scene to the stream and watch it, for so many turns. Returns when they were seen."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    tracks: list[Any] = []
    peer.on("track", tracks.append)
    peer.addTransceiver(SceneCamera(scene), direction="sendrecv")
    await peer.setLocalDescription(await peer.createOffer())
    offer = {"type": peer.localDescription.type, "sdp": peer.localDescription.sdp}
    request = urllib.request.Request(f"{url}/webrtc", json.dumps(offer).encode(), {"Content-Type": "application/json"})
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
    await peer.setRemoteDescription(RTCSessionDescription(**answer))
    seen, is_bright = list[float](), False
    while len(scene.turns) <= count:
        level = float((await tracks[0].recv()).to_ndarray(format="rgb24").mean())
        if (level > (DARK + BRIGHT) / 2) != is_bright:
            is_bright = not is_bright
            seen.append(time.time())
    await peer.close()
    return seen


def through_a_stream(count: int) -> list[float]:
    """Seconds from the camera of a client through a stream to its screen."""
    camera, scene = PageCamera(), Scene()
    screen = VideoScreen(HOME, 0, FPS, None, PageInputs(camera=camera), webrtc=True)
    screen.open()
    course = StreamRun(ranks=2, seed=0, rows=4, columns=6, first_block=0, adapt_sink=False)
    video = LiveVideo(lambda block: FORMAT.first_frame(block + 1) - FORMAT.first_frame(block))
    delivery = StreamDelivery(pace="realtime", output="skip_to_live")
    session = StreamSession(EchoingRanks().run, (course,), FORMAT, delivery, None, FrameSources(video=video), credit=3)
    with session.begin() as stream:
        source = Camera(camera)
        source.start()
        LiveFrames(source, stream, FPS, SIDE, SIDE).start()
        thread = threading.Thread(target=lambda: [screen.show(c.frames, c.pts, None) for c in stream], daemon=True)
        thread.start()
        seen = asyncio.run(client(screen.page.url, scene, count))
        stream.cancel()
        thread.join()
    screen.close()
    return delays(scene.turns, seen)


def on_a_page(query: str, count: int) -> list[float]:
    """Seconds from a frame of a stream to its image on a page in a browser."""
    chromium = installed()
    if chromium is None:
        raise SystemExit("no Chromium here: apt-get install chromium, or make browser")
    screen, scene, stop = VideoScreen(HOME, 0, FPS, None, webrtc=True), Scene(), threading.Event()
    screen.open()

    def show() -> None:
        begin = time.time()
        for number in range(1_000_000):
            frames = torch.full((FRAMES, SIDE, SIDE, 3), scene.level(), dtype=torch.uint8)
            screen.show(frames, number * BLOCK, None)
            if stop.wait(max(0.0, begin + (number + 1) * BLOCK - time.time())):
                return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        with started(chromium) as browser:
            page = browser.new_page()
            page.goto(screen.page.url + query)
            page.wait_for_function("document.querySelector('video')?.currentTime > 0.5")
            page.evaluate(SEEN)
            first = len(scene.turns)
            while len(scene.turns) <= first + count:
                time.sleep(0.1)
            seen = page.evaluate("window.turns")
    finally:
        stop.set()
        thread.join()
        screen.close()
    return delays(scene.turns[first:], seen)


def report(count: int) -> Iterator[str]:
    """The page of figures."""
    yield "# Seconds from glass to glass"
    yield ""
    yield (
        f"Made by `python -m benchmarks.stream.webrtc`: a scene that turns dark and bright, {SIDE} x {SIDE} pixels at "
        f"{FPS} frames per second, on this machine's loopback. The model's own time is {BLOCK:g} s, in which the "
        f"frames of a block come, and {STEP:g} s of the ranks."
    )
    yield ""
    yield "| | turns | median, s | longest, s | the model's own, s | above it (median), s |"
    yield "|---|---|---|---|---|---|"
    rows = (
        ("camera, stream, client of aiortc, by WebRTC", BLOCK + STEP, lambda: through_a_stream(count)),
        ("stream to a page in Chromium, by WebRTC", 0.0, lambda: on_a_page("", count)),
        ("stream to a page in Chromium, by MSE", 0.0, lambda: on_a_page("?mse", count)),
    )
    for name, own, measure in rows:
        found = measure()
        middle = statistics.median(found)
        yield f"| {name} | {len(found)} | {middle:.2f} | {max(found):.2f} | {own:.2f} | {middle - own:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, and write it where it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="of the scene, on each row (20)")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    publish(report(options.turns), options.write)


if __name__ == "__main__":
    main()
