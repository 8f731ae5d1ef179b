"""Talking-face streams: audio in, video with audio out; the prompt, and what is said, can change while they run."""

import time
from dataclasses import dataclass
from typing import Any

from patchpar import PlanError, StreamDelivery
from patchpar.media.mp4_fragments import FragmentEncoder, Mp4Fragment
from patchpar.stream.live_inputs import LiveAudio

from .feeds import LiveFeed, VideoFeed
from .image_stream import MAX_SECONDS as MAX_LIVE_SECONDS
from .image_stream import StreamControls, StreamSummary
from .job_queue import Job
from .saved_video import SavedVideo
from .video_file import VideoFile
from .workers import AppWorkers

MAX_SECONDS = 120.0  # all of the video is held, for reloaded pages


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkingFaceRequest:
    """Inputs of a talking face. `audio`: (samples, rate), or None for `seconds` of silence.

    `is_live`: the audio is that of the page's microphone, while the face talks, and silence where there is none.
    `pose`: a video of poses, for models that take one.
    """

    prompt: str = ""
    reference: Any = None
    audio: tuple[Any, int] | None = None
    seconds: float = 5.0
    seed: int = 0
    is_live: bool = False
    pose: VideoFile | None = None

    def __post_init__(self) -> None:
        needs_length = self.audio is None and not self.is_live
        if needs_length and not 0 < self.seconds <= MAX_SECONDS:
            raise PlanError(f"{self.seconds:g} seconds: the limit is more than 0 and at most {MAX_SECONDS:g}")

    def new_feed(self) -> VideoFeed:
        """A feed for its video: with a page that has a microphone, if it is live."""
        return LiveFeed() if self.is_live else VideoFeed()


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
        if request.pose is not None:
            found["pose"] = request.pose.in_memory()
        if request.is_live:
            delivery = StreamDelivery(pace="realtime", output="skip_to_live", keep_alive=True)
            return {**found, "audio": "live", "seconds": MAX_LIVE_SECONDS, "delivery": delivery}
        if request.audio is None:
            return {**found, "seconds": request.seconds}
        import torch

        samples, rate = request.audio
        return {**found, "audio": (torch.as_tensor(samples), rate)}

    def _take(self, session: Any, config: Any, job: Job) -> StreamSummary:
        began, frames, latencies, encoder = time.perf_counter(), 0, [], None
        microphone = self._microphone(session)
        for chunk in session:
            self._follow(session, job)
            if encoder is None:
                encoder = _encoder(config, chunk)
            self._show(encoder, encoder.add(chunk.frames, frames / config.fps, chunk.audio))
            frames += len(chunk.frames)
            latencies.append(chunk.latency)
            self._report(job, frames / config.fps, microphone)
        if encoder is not None:
            self._show(encoder, encoder.close())
        return StreamSummary(
            images=frames,
            seconds=time.perf_counter() - began,
            latency=sum(latencies) / max(1, len(latencies)),
            devices=self._workers.setup.devices.note,
            video=self._saved.video,
        )

    def _microphone(self, session: Any) -> LiveAudio | None:
        """Begin to push the audio of the page, if the stream is live."""
        if not isinstance(self._feed, LiveFeed):
            return None
        microphone = LiveAudio(self._feed.microphone, session)
        microphone.start()
        return microphone

    def _report(self, job: Job, seconds: float, microphone: LiveAudio | None) -> None:
        """Say how long the video is, and what is wrong with the microphone, if anything is."""
        job.show(note=f"streaming: {seconds:.1f} s of video")
        if microphone is not None and isinstance(self._feed, LiveFeed):
            self._feed.status = microphone.note or f"{seconds:.1f} s"

    def _follow(self, session: Any, job: Job) -> None:
        """Apply the controls of the page."""
        job.check()
        prompt = self._controls.take_prompt()
        if prompt is not None:
            try:
                session.set_prompt(prompt)
            except PlanError:  # too late for the stream, whose last chunks are still shown and saved
                if not session.is_over:
                    raise
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
