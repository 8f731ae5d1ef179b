"""A face that talks, for a page: sound in, film with sound out, the prompt changed while it runs."""

import time
from dataclasses import dataclass
from typing import Any

from patchpar import PlanError
from patchpar.stream.web.mp4_fragments import FragmentEncoder, Mp4Fragment

from .jobs import Job
from .keeping import SavedVideo
from .live import VideoFeed
from .streaming import StreamControls, StreamSummary
from .workers import AppWorkers

LONGEST = 120.0  # seconds; all of the film is held, for pages that are reloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkingFaceRequest:
    """What the face is to say and look like. `sound`: (samples, rate), or None for silence of `seconds`."""

    prompt: str = ""
    reference: Any = None
    sound: tuple[Any, int] | None = None
    seconds: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sound is None and not 0 < self.seconds <= LONGEST:
            raise PlanError(f"{self.seconds:g} seconds: a film has more than 0 and at most {LONGEST:g}")


class TalkingFaceJob:
    """A talking face as work for the desk."""

    def __init__(
        self,
        workers: AppWorkers,
        wanted: TalkingFaceRequest,
        controls: StreamControls,
        feed: VideoFeed,
        kept: SavedVideo,
    ) -> None:
        self._workers, self._wanted, self._controls, self._feed, self._kept = workers, wanted, controls, feed, kept

    def run(self, job: Job) -> StreamSummary:
        """Stream until the sound ends, or the page stops it. Raises what the stream raises, and Cancelled."""
        try:
            job.show(note="starting the workers of the face")
            pipe = self._workers.face_stream()
            job.check()
            with pipe.stream(self._wanted.prompt, **self._conditions()) as session:
                return self._take(session, pipe.config, job)
        finally:
            self._feed.close()

    def _conditions(self) -> dict[str, Any]:
        wanted = self._wanted
        found: dict[str, Any] = {"reference": wanted.reference, "seed": wanted.seed}
        if wanted.sound is None:
            return {**found, "seconds": wanted.seconds}
        import torch

        samples, rate = wanted.sound
        return {**found, "audio": (torch.as_tensor(samples), rate)}

    def _take(self, session: Any, config: Any, job: Job) -> StreamSummary:
        began, frames, latencies, film = time.perf_counter(), 0, [], None
        for chunk in session:
            self._follow(session, job)
            if film is None:
                film = _encoder(config, chunk)
            self._show(film, film.add(chunk.frames, frames / config.fps, chunk.audio))
            frames += len(chunk.frames)
            latencies.append(chunk.latency)
            job.show(note=f"streaming: {frames / config.fps:.1f} s of film")
        if film is not None:
            self._show(film, film.close())
        return StreamSummary(
            pictures=frames,
            seconds=time.perf_counter() - began,
            latency=sum(latencies) / max(1, len(latencies)),
            devices=self._workers.setup.devices.note,
            film=self._kept.film,
        )

    def _follow(self, session: Any, job: Job) -> None:
        """Do what the page has asked for meanwhile."""
        job.check()
        prompt = self._controls.heard()
        if prompt is not None:
            session.set_prompt(prompt)
        if self._controls.is_stopped:
            session.stop()

    def _show(self, film: FragmentEncoder, fragments: list[Mp4Fragment]) -> None:
        if fragments:
            self._feed.put(film.head, fragments)
            self._kept.append(film.head, fragments)


def _encoder(config: Any, chunk: Any) -> FragmentEncoder:
    """The first chunk tells how many samples belong to a frame."""
    rate = None if chunk.audio is None else round(len(chunk.audio) * config.fps / len(chunk.frames))
    return FragmentEncoder(config.fps, config.height, config.width, rate)
