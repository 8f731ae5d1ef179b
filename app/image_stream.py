"""Image streams: one image after another, from a prompt, an image, a video or a camera."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path
from typing import Any, Literal

from patchpar import PlanError

from .feeds import ImageFeed
from .job_queue import Job
from .limits import read_image
from .noise_walk import NoiseWalk
from .requests import MAX_PROMPT, GenerateRequest, check_text
from .saved_video import SavedVideo
from .video_file import MAX_FRAME_PIXELS, MAX_RATE, VideoFile
from .workers import AppWorkers

Source = Literal["prompt", "image", "video", "camera"]
MAX_SECONDS = 600.0  # a stream that nobody stops ends, since others may wait
CAMERA_SECONDS = 20.0
LEAD = 1  # images queued ahead: few, so that a changed prompt shows soon


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What to stream. Raises PlanError.

    `image`: what each image begins with, of source "image"; `video`: whose frames they begin with, of source
    "video", `rate` of them for a second. `strength`: how much is new.
    """

    generate: GenerateRequest
    source: Source = "prompt"
    image: Any = None
    video: VideoFile | None = None
    rate: float = 8.0
    strength: float = 0.6

    def __post_init__(self) -> None:
        if self.source == "image" and self.image is None:
            raise PlanError("there is no input image: choose one, or another source")
        if self.source == "video" and self.video is None:
            raise PlanError("there is no input video: choose one, or another source")
        if not 0.05 <= self.strength <= 1:
            raise PlanError(f"strength {self.strength:g}: it is a number from 0.05 to 1")
        if not 1 <= self.rate <= MAX_RATE:
            raise PlanError(f"{self.rate:g} frames from a second: it is a number from 1 to {MAX_RATE:g}")
        if self.source != "prompt":
            self.generate.check_strength(self.strength)

    @property
    def fps(self) -> float:
        """Frame rate of the saved video: that of the frames taken from the input video."""
        return self.rate if self.video is None else self.video.frame_rate(self.rate)


@dataclass(slots=True)
class StreamControls:
    """Controls of a running stream, set by the page and read between two images.

    `frame`: the file of the camera's last image, which nobody has decoded.
    """

    prompt: str | None = None
    frame: Any = None
    is_stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set_prompt(self, prompt: str) -> None:
        """Change the prompt. Raises PlanError."""
        if not prompt.strip() or len(prompt) > MAX_PROMPT:
            raise PlanError(f"a prompt has 1 to {MAX_PROMPT} characters, not {len(prompt.strip())}")
        check_text("prompt", prompt)
        with self.lock:
            self.prompt = prompt

    def take_prompt(self) -> str | None:
        """The new prompt, once; None if it has not changed."""
        with self.lock:
            prompt, self.prompt = self.prompt, None
            return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """Statistics of a stream. `latency`: mean seconds from request to image. `video`: the saved file."""

    images: int
    seconds: float
    latency: float
    devices: str
    video: Path | None = None

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / max(self.seconds, 1e-6)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for the page."""
        return [
            ("Images", f"{self.images} in {self.seconds:.1f} s, {self.rate:.2f} per second"),
            ("Latency", f"{self.latency:.2f} s from request to image"),
            ("Devices", self.devices),
        ]


class ImageStreamJob:
    """An image stream as a job."""

    def __init__(
        self,
        workers: AppWorkers,
        request: StreamRequest,
        controls: StreamControls,
        feed: ImageFeed,
        saved_video: SavedVideo,
    ) -> None:
        self._workers, self._request, self._controls, self._feed, self._saved = (
            workers,
            request,
            controls,
            feed,
            saved_video,
        )

    def run(self, job: Job) -> StreamSummary:
        """Generate images until the page stops the stream. Raises what the pipeline raises, and Cancelled."""
        try:
            job.show(note="starting the workers of the stream")
            inputs = self._inputs(job)
            pipe = self._workers.image_stream(takes_image=self._request.source != "prompt")
            job.check()
            with pipe.stream(seed=self._request.generate.seed, lead=LEAD, **self._arguments()) as session:
                return self._take(session.map(self._requests(session, inputs)), job)
        finally:
            self._feed.close()
            self._saved.close()

    def _arguments(self) -> dict[str, Any]:
        """Arguments of all images."""
        generate = self._request.generate
        shared = {"prompt": generate.prompt, "num_inference_steps": generate.steps, "guidance_scale": generate.guidance}
        if generate.negative:
            shared["negative_prompt"] = generate.negative
        if self._request.source == "prompt":
            return {**shared, "height": generate.height, "width": generate.width}
        return {**shared, "strength": self._request.strength}

    def _take(self, results: Iterator[Any], job: Job) -> StreamSummary:
        began, latencies = time.perf_counter(), []
        for result in results:
            image = result.image.images[0] if hasattr(result.image, "images") else result.image
            self._feed.put(image)
            self._saved.add(image, self._request.fps)
            latencies.append(result.latency)
            job.show(note=self._progress(len(latencies), time.perf_counter() - began))
            if self._controls.is_stopped:
                break
            job.check()
        self._saved.close()
        return StreamSummary(
            images=len(latencies),
            seconds=time.perf_counter() - began,
            latency=sum(latencies) / max(1, len(latencies)),
            devices=self._workers.setup.devices.note,
            video=self._saved.video,
        )

    def _progress(self, generated: int, seconds: float) -> str:
        video = self._request.video if self._request.source == "video" else None
        expected_frames = video.expected_frames(self._request.rate) if video is not None else 0
        of_all = f" of {max(expected_frames, generated)}" if expected_frames else ""
        return f"streaming: {generated}{of_all} images, {generated / max(seconds, 1e-6):.2f} per second"

    def _requests(self, session: Any, inputs: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Arguments of each image, until the stream is stopped."""
        give_up = time.monotonic() + MAX_SECONDS
        for entry in inputs:
            if self._controls.is_stopped or time.monotonic() > give_up:
                return
            prompt = self._controls.take_prompt()
            if prompt is not None:
                session.set(prompt=prompt)
            yield entry

    def _inputs(self, job: Job) -> Iterator[dict[str, Any]]:
        if self._request.source == "prompt":
            return self._noises()
        size = (self._request.generate.width, self._request.generate.height)
        return ({"image": fitted(image, size)} for image in self._source_images(job))

    def _noises(self) -> Iterator[dict[str, Any]]:
        generate, model = self._request.generate, self._workers.loaded_model()
        shape = (model.latent_channels, generate.height // model.vae_scale, generate.width // model.vae_scale)
        noise_walk = NoiseWalk(generate.seed, shape)
        return ({"latents": noise_walk.at(number)} for number in count())

    def _source_images(self, job: Job) -> Iterator[Any]:
        """Input images, one after another."""
        request = self._request
        if request.source == "video" and request.video is not None:
            return request.video.frames(request.rate)
        if request.source == "image":
            return repeat(request.image)
        return iter(lambda: self._camera(job), None)

    def _camera(self, job: Job) -> Any:
        """The camera's latest frame; None when the stream was stopped. Raises PlanError."""
        give_up = time.monotonic() + CAMERA_SECONDS
        while self._controls.frame is None and not self._controls.is_stopped:
            job.check()
            if time.monotonic() > give_up:
                raise PlanError(f"no image from the camera for {CAMERA_SECONDS:g} s: allow the page to use it")
            time.sleep(0.05)
        return None if self._controls.is_stopped else read_image(self._controls.frame, MAX_FRAME_PIXELS)


def fitted(image: Any, size: tuple[int, int]) -> Any:
    """A PIL image, cropped and scaled to (width, height)."""
    from PIL import ImageOps

    return ImageOps.fit(image.convert("RGB"), size)
