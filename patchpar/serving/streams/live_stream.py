"""One stream of a server: its session, the thread that reads it, and what those who watch it get.

clients --controls, audio--> session --> ranks
clients <--video, images---- feeds <---- thread
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from patchpar.errors import PlanError
from patchpar.serving.request_error import RequestError
from patchpar.serving.streams.stream_request import StreamControl, reference_of
from patchpar.stream.session import StreamSession
from patchpar.web.feed import ImageFeed, VideoFeed
from patchpar.web.frame_player import FramePlayer
from patchpar.web.viewer import KEPT, VideoFeedWriter

IDLE_SECONDS = 60.0
"""A stream that nobody has watched for so long ends, so that it does not keep devices from others."""
STILL_SECONDS = 600.0
"""So does one that has made nothing for so long, watched or not: it is paused, or waits for audio."""
AHEAD_SECONDS = 60.0
"""Most audio that is held for blocks that have not begun."""
LOOK_SECONDS = 0.5
log = logging.getLogger(__name__)


class LiveStream:
    """A stream that runs. `rate`: audio samples per second of its video, None without audio. `owner`: who may see it.

    `audio_rate`: of the audio that is sent to it while it runs, None if it takes none. `ended` is called at its end,
    with whether its devices are free. The thread begins at `start`.
    """

    def __init__(
        self,
        session: StreamSession,
        *,
        owner: str,
        fps: float,
        rate: int | None,
        audio_rate: int | None,
        ended: Callable[[bool], object],
    ) -> None:
        self.id, self.owner, self.created_at = f"stream_{secrets.token_hex(16)}", owner, int(time.time())
        self.session, self.fps, self.rate, self.audio_rate = session, fps, rate, audio_rate
        self.video, self.images = VideoFeed(KEPT), ImageFeed()
        self.error: Exception | None = None
        self.seconds = 0.0
        self._ended = ended
        self._pushing = threading.Lock()  # of several clients, each sees what the others have pushed
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patchpar-live-stream", daemon=True)

    def start(self) -> "LiveStream":
        """Begin to read the session."""
        self._thread.start()
        return self

    @property
    def status(self) -> str:
        """That of the session, or "failed"."""
        return "failed" if self.error is not None else self.session.status

    @property
    def watchers(self) -> int:
        """Number of those who watch."""
        return self.video.watchers + self.images.watchers

    def push(self, pcm: bytes) -> dict[str, Any]:
        """Append mono audio, 16-bit little-endian samples at `audio_rate` a second; return when it takes effect.

        Raises RequestError for a stream without live audio, half a sample, and too much audio ahead of the video.
        """
        import torch

        rate = self.audio_rate
        if rate is None:
            raise RequestError("this stream takes no audio: create it with audio=live", param="audio")
        if len(pcm) % 2:
            raise RequestError(f"{len(pcm)} bytes of audio: samples have 2 bytes each", param="audio")
        if not pcm:
            return {}
        samples = torch.frombuffer(bytearray(pcm), dtype=torch.int16).float() / 32768
        with self._pushing:
            ahead = self.session.audio_ahead
            if ahead + len(samples) / rate > AHEAD_SECONDS:
                raise RequestError(
                    f"audio is {ahead:.0f} s ahead of the video, and at most {AHEAD_SECONDS:g} s are held: send it as "
                    "it is spoken",
                    status=429,
                    param="audio",
                    code="above_limit",
                )
            return asdict(self.session.push_audio(samples, rate))

    def control(self, control: StreamControl) -> dict[str, Any]:
        """Apply a control and return when it takes effect. Raises PlanError and RequestError."""
        session, at = self.session, control.at
        if control.type == "flush":
            return {"dropped": session.flush()}
        if control.type == "prompt":
            effect = session.set_prompt(
                control.text or "", at=at, transition=control.transition or "switch", over=control.over or 0
            )
        elif control.type == "param":
            effect = session.set_param(control.name or "", control.value or 0.0, at=at)
        elif control.type == "reference":
            effect = session.set_reference(reference_of(control), at=at)
        else:
            effect = getattr(session, control.type)()
        return asdict(effect)

    def stop(self) -> None:
        """Begin nothing further; what has begun is still shown."""
        self.session.stop()

    def cancel(self) -> None:
        """End now."""
        self.session.cancel()

    def _run(self) -> None:
        writer, player = VideoFeedWriter(self.video, self.fps, self.rate), FramePlayer(self.images.put_frame, self.fps)
        self._attempt(lambda: self._play(writer, player))
        for close in (
            writer.close,
            lambda: player.close(drops=self.session.status == "cancelled"),
            self.video.close,
            self.images.close,
        ):
            self._attempt(close)
        is_free = self._attempt(self.session.close)
        self._ended(is_free)  # first: who sees that it is over finds room for another one
        self.over.set()

    def _play(self, writer: VideoFeedWriter, player: FramePlayer) -> None:
        player.start()
        threading.Thread(target=self._end_when_idle, name="patchpar-idle-stream", daemon=True).start()
        for chunk in self.session:
            writer.add(chunk.frames, chunk.pts, chunk.audio)
            self.seconds = chunk.pts + len(chunk.frames) / self.fps
            if self.images.watchers:
                player.add(chunk.frames)

    def _attempt(self, part: Callable[[], object]) -> bool:
        """Do a part of the stream's work, and return whether it was done; those after it are done all the same."""
        try:
            part()
        except Exception as error:
            if not isinstance(error, PlanError):  # which its clients are told
                log.exception("%s failed", self.id)
            self.error = self.error or error.with_traceback(None)
            return False
        return True

    def _end_when_idle(self) -> None:
        """Cancel the stream once nobody watches it, or it stands still, for too long."""
        watched_at = moved_at = time.monotonic()
        seconds = self.seconds
        while not self.over.wait(LOOK_SECONDS):
            now = time.monotonic()
            if self.watchers:
                watched_at = now
            if self.seconds != seconds:
                moved_at, seconds = now, self.seconds
            reason = ""
            if now > watched_at + IDLE_SECONDS:
                reason = f"nobody has watched it for {IDLE_SECONDS:g} s"
            elif now > moved_at + STILL_SECONDS:
                reason = f"it is paused or waits for audio, and has made nothing for {STILL_SECONDS:g} s"
            if reason:
                log.warning("%s ends: %s", self.id, reason)
                self.session.cancel()
                return
