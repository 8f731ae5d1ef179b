"""A stream by WebRTC (RFC 8825), through aiortc: frames and audio to browsers, microphone and camera from them.

    stream --add--> peers --[ newest frame, last audio ]--> any number of browsers, each with an encoder of its own
    PageInputs <------------[ frames as they are decoded ]--

Unlike with MSE nothing is buffered for a smooth video: a browser shows a frame when it comes.
"""

import asyncio
import json
import time
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from aiortc import (  # asked for before it is imported, see VideoScreen
    MediaStreamTrack,
    RTCConfiguration,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.image_file import check_pixels
from patchpar.media.resample import Resampler
from patchpar.web.frame_player import FramePlayer
from patchpar.web.page_input import MAX_PIXELS, PageInput, PageInputs

MAX_PEERS = 8
"""Each has an encoder of its own."""
AUDIO_RATE, AUDIO_SAMPLES = 48_000, 960
"""Opus: samples per second, and of a packet of 20 ms."""
VIDEO_CLOCK = 90_000
"""RTP timestamps per second of video."""
AUDIO_SLACK = 0.25
"""Seconds of audio that may wait beyond those of one block; older ones are dropped."""
QUIET_SECONDS = 1.0
"""An input that has sent nothing for so long is free for another page."""
JOIN_SECONDS = 15.0
"""A browser that has an answer and does not connect for so long has gone, and leaves its place to another."""
CLOSE_SECONDS = 2.0


class FrameTrack(MediaStreamTrack):  # type: ignore[misc]  # aiortc has no types here
    """The newest frame of a stream, for one browser."""

    kind = "video"

    def __init__(self) -> None:
        super().__init__()
        self._newest: Any = None
        self._is_new = asyncio.Event()
        self._began = time.monotonic()

    def put(self, frame_HW3: Any) -> None:
        """Replace the newest frame, in uint8. In the event loop."""
        self._newest = frame_HW3
        self._is_new.set()

    async def recv(self) -> Any:
        import av

        await self._is_new.wait()
        self._is_new.clear()
        frame = av.VideoFrame.from_ndarray(self._newest, format="rgb24")
        frame.pts = round((time.monotonic() - self._began) * VIDEO_CLOCK)
        frame.time_base = Fraction(1, VIDEO_CLOCK)
        return frame


class OutgoingAudio(MediaStreamTrack):  # type: ignore[misc]
    """The audio of a stream, for one browser: 20 ms at a time by the clock, with silence where there is none."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._waiting, self._sent = np.zeros(0, np.int16), 0
        self._began: float | None = None

    def put(self, samples_N: Any) -> None:
        """Append samples in int16 at AUDIO_RATE. What is more than they and AUDIO_SLACK is dropped. In the loop."""
        room = len(samples_N) + round(AUDIO_SLACK * AUDIO_RATE)
        self._waiting = np.concatenate([self._waiting, samples_N])[-room:]

    async def recv(self) -> Any:
        """Return the next 20 ms, as aiortc asks for them."""
        import av

        now = time.monotonic()
        self._began = now if self._began is None else self._began
        await asyncio.sleep(self._began + self._sent / AUDIO_RATE - now)
        samples, self._waiting = np.split(self._waiting, [AUDIO_SAMPLES])
        whole = np.pad(samples, (0, AUDIO_SAMPLES - len(samples)))
        frame = av.AudioFrame.from_ndarray(whole[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = AUDIO_RATE, self._sent, Fraction(1, AUDIO_RATE)
        self._sent += AUDIO_SAMPLES
        return frame


class RtcPeers:
    """The browsers that watch a stream of `fps` frames per second, with audio of `rate` samples per second or None.

    `inputs`: what they may send. `add` is called by the stream, everything else in the event loop of the server.
    """

    def __init__(self, fps: float, rate: int | None, inputs: PageInputs) -> None:
        self._rate, self._inputs = rate, inputs
        self._peers: dict[Any, tuple[FrameTrack, OutgoingAudio | None]] = {}
        self._joining = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._player = FramePlayer(self._show, fps, slack=1)
        self._player.start()
        self._resampler = None if rate is None else Resampler(rate, AUDIO_RATE)

    @property
    def watchers(self) -> int:
        return len(self._peers)

    def add(self, frames_FHWC: Tensor, audio_N: Tensor | None) -> None:
        """Send frames [F, H, W, 3] in uint8 and audio between -1 and 1 to all, without waiting for them."""
        if self._loop is None or not self._peers:
            return
        self._player.add(frames_FHWC)
        if audio_N is not None and self._resampler is not None:
            samples = (self._resampler.push(audio_N.float()) * 2**15).round().clamp(-(2**15), 2**15 - 1)
            self._loop.call_soon_threadsafe(self._hear, samples.to(torch.int16).numpy())

    async def answer(self, offer: bytes) -> dict[str, str]:
        """Connect a browser; `offer` and the answer are session descriptions in JSON. Raises PlanError."""
        self._loop = asyncio.get_running_loop()
        if len(self._peers) + self._joining >= MAX_PEERS:
            raise PlanError(f"{MAX_PEERS} browsers watch by WebRTC, and that is the limit: watch at ?mse")
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))  # by default it would ask a server of Google's
        try:
            self._joining += 1  # many may come at once
            try:
                await peer.setRemoteDescription(_description(offer))
            finally:
                self._joining -= 1
            self._send_to(peer)
            await peer.setLocalDescription(await peer.createAnswer())
        except Exception as error:
            await self._leave(peer)
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"that offer cannot be answered: {error}") from error
        self._begin(self._awaited(peer))
        return {"type": peer.localDescription.type, "sdp": peer.localDescription.sdp}

    def close(self) -> None:
        """Disconnect all. Idempotent."""
        self._player.close(drops=True)
        loop, self._loop = self._loop, None
        if loop is not None and loop.is_running():
            done = asyncio.run_coroutine_threadsafe(self._leave_all(), loop)
            with suppress(TimeoutError, FutureTimeout):  # browsers find out by themselves
                done.result(CLOSE_SECONDS)

    def _send_to(self, peer: Any) -> None:
        """Give a browser the tracks that it offers to take, and take those that it sends."""
        kinds = {each.kind for each in peer.getTransceivers()}
        video, audio = FrameTrack(), OutgoingAudio() if self._rate is not None and "audio" in kinds else None
        if "video" not in kinds:
            raise PlanError("that offer takes no video")
        for track in (video, audio):
            if track is not None:
                peer.addTrack(track)
        notes = list[Any]()  # the channel on which the browser hears why its input is not used
        peer.on("datachannel", notes.append)
        for transceiver in peer.getTransceivers():
            source = self._inputs.microphone if transceiver.kind == "audio" else self._inputs.camera
            if source is not None and (track := transceiver.receiver.track) is not None:  # None: it sends nothing
                self._begin(_receive(track, source, notes))
        self._peers[peer] = (video, audio)

        @peer.on("connectionstatechange")  # type: ignore[untyped-decorator]
        async def changed() -> None:
            if peer.connectionState in ("failed", "closed"):
                await self._leave(peer)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _awaited(self, peer: Any) -> None:
        """Leave a browser that does not connect: its page was closed, or reloaded, meanwhile. Nothing else says so."""
        await asyncio.sleep(JOIN_SECONDS)
        if peer.connectionState in ("new", "connecting"):
            await self._leave(peer)

    async def _leave(self, peer: Any) -> None:
        self._peers.pop(peer, None)
        for transceiver in peer.getTransceivers():
            if (track := transceiver.receiver.track) is not None:
                track.stop()  # aiortc ends those of browsers that have connected only
        await peer.close()

    async def _leave_all(self) -> None:
        await asyncio.gather(*(self._leave(peer) for peer in list(self._peers)), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()

    def _show(self, frame_HWC: Tensor) -> None:
        if self._loop is not None:
            frame = np.ascontiguousarray(frame_HWC.numpy())
            self._loop.call_soon_threadsafe(self._put, frame)

    def _put(self, frame_HW3: Any) -> None:
        for video, _ in self._peers.values():
            video.put(frame_HW3)

    def _hear(self, samples_N: Any) -> None:
        for _, audio in self._peers.values():
            if audio is not None:
                audio.put(samples_N)


async def _receive(track: Any, source: PageInput[Any], notes: list[Any]) -> None:
    """Give the frames of a browser to `source`, as long as no other page sends. `notes`: a channel, once it is open."""
    import av

    sender, is_refused = object(), False
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=AUDIO_RATE)
    try:
        while True:
            try:
                frame = await asyncio.wait_for(track.recv(), QUIET_SECONDS)
            except asyncio.TimeoutError:
                source.end(sender)
                continue
            try:
                _put(frame, source, sender, resampler if track.kind == "audio" else None)
                is_refused = False
            except PlanError as error:  # another page sends, or the image is too large
                if not is_refused and notes:
                    is_refused = True
                    notes[0].send(json.dumps({"type": "error", "message": str(error), "kind": track.kind}))
    except MediaStreamError:  # the browser has gone
        pass
    finally:
        source.end(sender)


def _put(frame: Any, source: PageInput[Any], sender: object, resampler: Any) -> None:
    """Give one frame to `source`, of audio with a `resampler`. Raises PlanError, also for too large an image."""
    if resampler is None:
        check_pixels(frame.width, frame.height, "the image", MAX_PIXELS)
    source.begin(sender)
    if resampler is None:
        source.put(sender, frame.to_image())
        return
    for part in resampler.resample(frame):
        source.put(sender, (torch.from_numpy(part.to_ndarray()), AUDIO_RATE))


def _description(offer: bytes) -> Any:
    """Parse an offer. Raises PlanError."""
    try:
        found = json.loads(offer)
        return RTCSessionDescription(sdp=str(found["sdp"]), type=str(found["type"]))
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError("that is no offer: send {'type': 'offer', 'sdp': ...} in JSON") from error
