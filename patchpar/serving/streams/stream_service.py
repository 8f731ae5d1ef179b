"""Streams of one model: opening it, a limited number of streams at once, and their end. Knows nothing of HTTP."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole
from patchpar.serving.lora_registry import LoraRegistry
from patchpar.serving.metrics import ServerMetrics
from patchpar.serving.refusals import check_name, loading
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import ServedModel, ServerSettings
from patchpar.serving.socket_tickets import SocketTickets
from patchpar.serving.streams.live_stream import LiveStream
from patchpar.serving.streams.stream_request import LiveStreamRequest
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import StreamDelivery

KEPT = 64
"""So many streams that have ended are listed."""
RETRY_SECONDS = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSlots:
    """`count` streams at once, each on an equal part of the devices. Raises PlanError for more slots than devices."""

    count: int
    devices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not is_whole(self.count, most=len(self.devices)):
            raise PlanError(f"--stream-slots {self.count}: there are {len(self.devices)} devices: use 1 to that many")

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each slot."""
        ends = [number * len(self.devices) // self.count for number in range(self.count + 1)]
        return tuple(self.devices[start:end] for start, end in pairwise(ends))


class StreamService:
    """Streams of one model. `metrics` counts requests. `tickets`: of browsers, for WebSockets."""

    route = "/v1/streams"

    def __init__(self, served: ServedModel, settings: ServerSettings, slots: int = 1) -> None:
        self.served, self.settings = served, settings
        self.metrics, self.loras, self.tickets = ServerMetrics(), LoraRegistry(), SocketTickets()
        self._slots = StreamSlots(count=slots, devices=served.devices)
        self._lock = threading.Lock()
        self._free: list[StreamingPipeline] = []
        self._pipes: list[StreamingPipeline] = []
        self._streams: dict[str, LiveStream] = {}
        self._lost = 0  # slots whose devices do not end their stream
        self._is_draining = False
        self.metrics.watch(queue_lengths=dict, state=lambda: self.state)

    @property
    def name(self) -> str:
        """The name of the served model."""
        return self.served.name

    @property
    def model_facts(self) -> dict[str, Any]:
        """What clients are told of the model, beside its name."""
        return {"tasks": ["streams"]}

    @property
    def state(self) -> str:
        """One of loading, ready, lost and draining."""
        if self._is_draining:
            return "draining"
        if not self._pipes:
            return "loading"
        return "ready" if self._lost < len(self._pipes) else "lost"

    @property
    def audio_rate(self) -> int | None:
        """Audio samples per second that the model takes; None if it takes none, or is not loaded."""
        return self._pipes[0].rate if self._pipes else None

    @property
    def is_computing(self) -> bool:
        """Whether a stream still runs after `close`, on a device in this process."""
        return any(pipe.is_computing for pipe in self._pipes)

    def load(self) -> None:
        """Start the workers of all slots and load the model. Raises what these raise."""
        opened: list[StreamingPipeline] = []
        try:
            for devices in self._slots.parts:
                opened.append(
                    StreamingPipeline.from_pretrained(self.served.model, devices=list(devices), **self.served.options)
                )
        except BaseException:
            for pipe in opened:
                pipe.close()
            raise
        self.adopt(opened)

    def adopt(self, pipes: Sequence[StreamingPipeline]) -> None:
        """Use open pipelines, one for each slot, and close them at the end."""
        with self._lock:
            self._pipes, self._free = list(pipes), list(pipes)

    def check_name(self, name: str) -> None:
        """Raise RequestError, 404, for a model that is not served."""
        check_name(name, self.name)

    def create(self, request: LiveStreamRequest, owner: str, **files: Any) -> LiveStream:
        """Begin a stream. Raises RequestError: 400, 404, and 503 where all slots are taken.

        `files`: `reference`, a PIL image; `audio`, an AudioFile, for a stream of its length; `pose`, a file object of a
        pose video.
        """
        self.check_name(request.model or self.name)
        pipe = self._taken()
        try:
            return self._begun(pipe, request, owner, files)
        except PlanError as error:
            self._give_back(pipe, is_free=True)
            raise RequestError(str(error)) from None
        except BaseException:
            self._give_back(pipe, is_free=True)
            raise

    def _begun(self, pipe: Any, request: LiveStreamRequest, owner: str, files: Mapping[str, Any]) -> LiveStream:
        most, audio = self.settings.limits.stream_seconds, files.get("audio")
        seconds = request.seconds
        if seconds is not None and seconds > most:
            raise RequestError(
                f"seconds={seconds:g}, and a stream has at most {most:g}", param="seconds", code="above_limit"
            )
        if audio is not None and request.audio is not None:
            raise RequestError("audio=live and a file of audio: send one of them", param="audio")
        is_live = request.audio == "live"
        if request.audio_rate is not None and not is_live:
            raise RequestError(
                f"audio_rate={request.audio_rate} is of audio that is sent while the stream runs: pass audio=live, or "
                "leave it out",
                param="audio_rate",
                code="unsupported_parameter",
            )
        session = pipe.stream(
            request.prompt,
            **{**files, "audio": "live" if is_live else audio},
            seed=request.seed,
            seconds=most if seconds is None and audio is None else seconds,
            delivery=StreamDelivery(
                output="block",  # audio that is sent ahead, such as synthesised speech, is played whole
                pace="realtime",
                fps=request.fps,
                keep_alive=request.keep_alive,
            ),
        )
        try:
            stream = LiveStream(
                session,
                owner=owner,
                fps=request.fps or pipe.config.fps,
                rate=pipe.rate,
                audio_rate=(request.audio_rate or pipe.rate) if is_live else None,
                ended=partial(self._give_back, pipe),
            )
            return self._started(stream)
        except BaseException:
            session.close()
            raise

    def _started(self, stream: LiveStream) -> LiveStream:
        """Start a stream and keep it. Raises RequestError, 503, if the server has begun to end meanwhile."""
        with self._lock:
            self._check_open()
            self._streams[stream.id] = stream.start()
            ended = [each.id for each in self._streams.values() if each.over.is_set()]
            for name in ended[: max(0, len(ended) - KEPT)]:
                del self._streams[name]
        return stream

    def get(self, name: str, owner: str) -> LiveStream:
        """Return a stream by its ID. Raises RequestError, 404, also for that of another owner."""
        with self._lock:
            found = self._streams.get(name)
        if found is None or found.owner != owner:
            raise RequestError(f"there is no stream {name[:80]!r}", status=404, code="not_found")
        return found

    def all_of(self, owner: str) -> list[LiveStream]:
        """Return the streams of an owner, the oldest first."""
        with self._lock:
            return [each for each in self._streams.values() if each.owner == owner]

    def check_room(self, request: LiveStreamRequest) -> None:
        """Raise RequestError as `create` would now, whatever comes with the request."""
        self.check_name(request.model or self.name)
        with self._lock:
            self._check_free()

    def _taken(self) -> StreamingPipeline:
        with self._lock:
            self._check_free()
            return self._free.pop()

    def _check_free(self) -> None:
        self._check_open()
        if not self._pipes:
            raise loading()
        if not self._free:
            reason = f"all {self._slots.count} streams are taken: end one, or start the server with --stream-slots"
            raise RequestError(reason, status=503, code="queue_full", retry_after=RETRY_SECONDS)

    def _check_open(self) -> None:
        if self._is_draining:
            reason = "the server is ending and begins no more streams"
            raise RequestError(reason, status=503, code="draining", retry_after=RETRY_SECONDS)

    def _give_back(self, pipe: StreamingPipeline, is_free: bool) -> None:
        """Let others have a slot, unless its devices do not end what they do."""
        with self._lock:
            if is_free:
                self._free.append(pipe)
                return
            self._lost += 1
        log.error("a slot is lost: its devices do not end their stream. Start the server again")

    def _stop_taking(self) -> list[LiveStream]:
        """Begin no more streams; return those that are there."""
        with self._lock:
            self._is_draining = True
            return list(self._streams.values())

    def drain(self, seconds: float) -> bool:
        """Begin no more streams, and let those that run end after what has begun; return whether all have."""
        give_up = time.monotonic() + seconds
        streams = self._stop_taking()
        for stream in streams:
            stream.stop()
        return all([stream.over.wait(max(0.0, give_up - time.monotonic())) for stream in streams])

    def close(self) -> None:
        """End all streams and the workers. Idempotent."""
        for stream in self._stop_taking():
            stream.cancel()
        for pipe in self._pipes:
            pipe.close(wait=False)
