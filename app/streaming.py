"""Streams of pictures for a page: one after another, out of a prompt, a picture, a film or a camera."""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path
from typing import Any, Literal

from patchpar import PlanError

from .footage import MOST_FRAME_PIXELS, MOST_RATE, VideoFile
from .jobs import Job
from .keeping import SavedVideo
from .limits import picture_from
from .live import ImageFeed
from .orders import LONGEST_PROMPT, GenerateRequest
from .walk import NoiseWalk
from .workers import AppWorkers

Source = Literal["prompt", "picture", "film", "camera"]
MOST_SECONDS = 600.0  # a stream that nobody stops ends by itself, because others wait
CAMERA_SECONDS = 20.0
LEAD = 1  # pictures that may be ready: a changed prompt is to be seen soon


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What to stream. Raises PlanError.

    `picture`: what each picture begins with, of source "picture"; `film`: whose frames they begin with, of source
    "film", `rate` of them for a second. `strength`: how much is new.
    """

    order: GenerateRequest
    source: Source = "prompt"
    picture: Any = None
    film: VideoFile | None = None
    rate: float = 8.0
    strength: float = 0.6

    def __post_init__(self) -> None:
        if self.source == "picture" and self.picture is None:
            raise PlanError("there is no picture to begin with: choose one, or another source")
        if self.source == "film" and self.film is None:
            raise PlanError("there is no film to begin with: choose one, or another source")
        if not 0.05 <= self.strength <= 1:
            raise PlanError(f"strength {self.strength:g}: it is a number from 0.05 to 1")
        if not 1 <= self.rate <= MOST_RATE:
            raise PlanError(f"{self.rate:g} frames from a second: it is a number from 1 to {MOST_RATE:g}")

    @property
    def steps(self) -> int:
        """How many are drawn of each picture: those that its strength leaves."""
        return self.order.steps if self.source == "prompt" else int(self.order.steps * self.strength)

    @property
    def fps(self) -> float:
        """Pictures in a second of the film that is kept: as many as are taken from a second of the one begun with."""
        return self.rate if self.film is None else self.film.pace(self.rate)

    def check_devices(self, count: int) -> None:
        """Raise PlanError if there is not a step for each of `count` devices."""
        if self.steps >= count:
            return
        of_them = "" if self.source == "prompt" else f", of which strength {self.strength:g} leaves {self.steps}"
        way_out = f"use at least {math.ceil(count / (1 if self.source == 'prompt' else self.strength))} steps"
        raise PlanError(f"{self.order.steps} steps{of_them}, but each of {count} devices draws one: {way_out}")


@dataclass(slots=True)
class StreamControls:
    """What a page may change while its stream runs; read by the stream between two pictures.

    `frame`: the file of the camera's last picture, which nobody has decoded.
    """

    prompt: str | None = None
    frame: Any = None
    is_stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, prompt: str) -> None:
        """Another prompt from now on. Raises PlanError."""
        if not prompt.strip() or len(prompt) > LONGEST_PROMPT:
            raise PlanError(f"a prompt has 1 to {LONGEST_PROMPT} characters, not {len(prompt.strip())}")
        with self.lock:
            self.prompt = prompt

    def heard(self) -> str | None:
        """The new prompt, once."""
        with self.lock:
            prompt, self.prompt = self.prompt, None
            return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """How a stream went. `latency`: mean seconds from a picture's order to the picture. `film`: where it is kept."""

    pictures: int
    seconds: float
    latency: float
    devices: str
    film: Path | None = None

    @property
    def rate(self) -> float:
        """Pictures per second."""
        return self.pictures / max(self.seconds, 1e-6)

    def rows(self) -> list[tuple[str, str]]:
        """For the page."""
        return [
            ("Pictures", f"{self.pictures} in {self.seconds:.1f} s, {self.rate:.2f} per second"),
            ("Latency", f"{self.latency:.2f} s from the order of a picture to the picture"),
            ("Devices", self.devices),
        ]


class ImageStreamJob:
    """A stream of pictures as work for the desk."""

    def __init__(
        self, workers: AppWorkers, wanted: StreamRequest, controls: StreamControls, feed: ImageFeed, kept: SavedVideo
    ) -> None:
        self._workers, self._wanted, self._controls, self._feed, self._kept = workers, wanted, controls, feed, kept

    def run(self, job: Job) -> StreamSummary:
        """Draw picture after picture until the page stops it. Raises what the pipeline raises, and Cancelled."""
        try:
            job.show(note="starting the workers of the stream")
            inputs = self._inputs(job)
            pipe = self._workers.picture_stream(takes_image=self._wanted.source != "prompt")
            job.check()
            with pipe.stream(seed=self._wanted.order.seed, lead=LEAD, **self._arguments()) as session:
                return self._take(session.map(self._asked(session, inputs)), job)
        finally:
            self._feed.close()
            self._kept.close()

    def _arguments(self) -> dict[str, Any]:
        """What all pictures share."""
        order = self._wanted.order
        shared = {"prompt": order.prompt, "num_inference_steps": order.steps, "guidance_scale": order.guidance}
        if order.negative:
            shared["negative_prompt"] = order.negative
        if self._wanted.source == "prompt":
            return {**shared, "height": order.height, "width": order.width}
        return {**shared, "strength": self._wanted.strength}

    def _take(self, shots: Iterator[Any], job: Job) -> StreamSummary:
        began, latencies = time.perf_counter(), []
        for shot in shots:
            picture = shot.picture.images[0] if hasattr(shot.picture, "images") else shot.picture
            self._feed.put(picture)
            self._kept.add(picture, self._wanted.fps)
            latencies.append(shot.latency)
            job.show(note=self._progress(len(latencies), time.perf_counter() - began))
            if self._controls.is_stopped:
                break
            job.check()
        self._kept.close()
        return StreamSummary(
            pictures=len(latencies),
            seconds=time.perf_counter() - began,
            latency=sum(latencies) / max(1, len(latencies)),
            devices=self._workers.setup.devices.note,
            film=self._kept.film,
        )

    def _progress(self, drawn: int, seconds: float) -> str:
        film = self._wanted.film if self._wanted.source == "film" else None
        expected = film.expected(self._wanted.rate) if film is not None else 0
        of_all = f" of {max(expected, drawn)}" if expected else ""
        return f"streaming: {drawn}{of_all} pictures, {drawn / max(seconds, 1e-6):.2f} per second"

    def _asked(self, session: Any, inputs: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """What differs from picture to picture, as long as somebody wants it."""
        give_up = time.monotonic() + MOST_SECONDS
        for entry in inputs:
            if self._controls.is_stopped or time.monotonic() > give_up:
                return
            prompt = self._controls.heard()
            if prompt is not None:
                session.set(prompt=prompt)
            yield entry

    def _inputs(self, job: Job) -> Iterator[dict[str, Any]]:
        if self._wanted.source == "prompt":
            return self._noises()
        size = (self._wanted.order.width, self._wanted.order.height)
        return ({"image": fitted(picture, size)} for picture in self._seen(job))

    def _noises(self) -> Iterator[dict[str, Any]]:
        order, model = self._wanted.order, self._workers.described()
        shape = (model.latent_channels, order.height // model.vae_scale, order.width // model.vae_scale)
        walk = NoiseWalk(order.seed, shape)
        return ({"latents": walk.at(number)} for number in count())

    def _seen(self, job: Job) -> Iterator[Any]:
        """What pictures begin with, one after another."""
        wanted = self._wanted
        if wanted.source == "film" and wanted.film is not None:
            return wanted.film.frames(wanted.rate)
        if wanted.source == "picture":
            return repeat(wanted.picture)
        return iter(lambda: self._camera(job), None)

    def _camera(self, job: Job) -> Any:
        """What the camera has sent last; None when the page has stopped. Raises PlanError."""
        give_up = time.monotonic() + CAMERA_SECONDS
        while self._controls.frame is None and not self._controls.is_stopped:
            job.check()
            if time.monotonic() > give_up:
                raise PlanError(f"no picture from the camera for {CAMERA_SECONDS:g} s: allow the page to use it")
            time.sleep(0.05)
        return None if self._controls.is_stopped else picture_from(self._controls.frame, MOST_FRAME_PIXELS)


def fitted(picture: Any, size: tuple[int, int]) -> Any:
    """A PIL picture, cut and scaled to (width, height)."""
    from PIL import ImageOps

    return ImageOps.fit(picture.convert("RGB"), size)
