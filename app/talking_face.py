"""Talking-face streams: audio in, video with audio out; the prompt can change while they run."""

import time
from dataclasses import dataclass
from typing import Any

from patchpar import PlanError
from patchpar.stream.web.mp4_fragments import FragmentEncoder, Mp4Fragment

from .feeds import VideoFeed
from .image_stream import StreamControls, StreamSummary
from .job_queue import Job
from .saved_video import SavedVideo
from .workers import AppWorkers

MAX_SECONDS = 120.0  # all of the video is held, for reloaded pages


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkingFaceRequest:
    """Inputs of a talking face. `audio`: (samples, rate), or None for `seconds` of silence."""

    prompt: str = ""
    reference: Any = None
    audio: tuple[Any, int] | None = None
    seconds: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.audio is None and not 0 < self.seconds <= MAX_SECONDS:
            raise PlanError(f"{self.seconds:g} seconds: the limit is more than 0 and at most {MAX_SECONDS:g}")


class TalkingFaceJob:
    """A talking-face stream as a job."""

    def __init__(
        self,
        workers: AppWorkers,
        request: TalkingFaceRequest,
        controls: StreamControls,
        feed: VideoFeed,
        saved: SavedVideo,
    ) -> None:
        self._workers, self._request, self._controls, self._feed, self._saved = workers, request, controls, feed, saved

    def run(self, job: Job) -> StreamSummary:
        """Stream until the audio ends, or the page stops it. Raises what the stream raises, and Cancelled."""
        try:
            job.show(note="starting the talking-face workers")
            pipe = self._workers.face_stream()
            job.check()
            with pipe.stream(self._request.prompt, **self._conditions()) as session:
                return self._take(session, pipe.config, job)
        finally:
            self._feed.close()

    def _conditions(self) -> dict[str, Any]:
        request = self._request
        found: dict[str, Any] = {"reference": request.reference, "seed": request.seed}
        if request.audio is None:
            return {**found, "seconds": request.seconds}
        import torch

        samples, rate = request.audio
        return {**found, "audio": (torch.as_tensor(samples), rate)}

    def _take(self, session: Any, config: Any, job: Job) -> StreamSummary:
        began, frames, latencies, encoder = time.perf_counter(), 0, [], None
        for chunk in session:
            self._follow(session, job)
            if encoder is None:
                encoder = _encoder(config, chunk)
            self._show(encoder, encoder.add(chunk.frames, frames / config.fps, chunk.audio))
            frames += len(chunk.frames)
            latencies.append(chunk.latency)
            job.show(note=f"streaming: {frames / config.fps:.1f} s of video")
        if encoder is not None:
            self._show(encoder, encoder.close())
        return StreamSummary(
            images=frames,
            seconds=time.perf_counter() - began,
            latency=sum(latencies) / max(1, len(latencies)),
            devices=self._workers.setup.devices.note,
            video=self._saved.video,
        )

    def _follow(self, session: Any, job: Job) -> None:
        """Apply the controls of the page."""
        job.check()
        prompt = self._controls.take_prompt()
        if prompt is not None:
            session.set_prompt(prompt)
        if self._controls.is_stopped:
            session.stop()

    def _show(self, encoder: FragmentEncoder, fragments: list[Mp4Fragment]) -> None:
        if fragments:
            self._feed.put(encoder.head, fragments)
            self._saved.append(encoder.head, fragments)


def _encoder(config: Any, chunk: Any) -> FragmentEncoder:
    """An encoder whose audio rate is that of the first chunk."""
    rate = None if chunk.audio is None else round(len(chunk.audio) * config.fps / len(chunk.frames))
    return FragmentEncoder(config.fps, config.height, config.width, rate)
