"""A video from a prompt, by a model that generates videos, as a file that the page plays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar import PlanError, Run
from patchpar.media.video_file import frames_of, write_video

from .image_runner import ImageJobRunner, RunOptions
from .job_queue import Job
from .presets import Preset
from .requests import MAX_PIXELS, MAX_SEED, MAX_STEPS, MIN_SIDE, as_whole, check_text, check_whole

NAME = "video.mp4"
MAX_FRAMES = 1024
MAX_FPS = 60
LIMITS = {
    "height": (MIN_SIDE, MAX_PIXELS // MIN_SIDE),
    "width": (MIN_SIDE, MAX_PIXELS // MIN_SIDE),
    "frames": (1, MAX_FRAMES),
    "steps": (1, MAX_STEPS),
    "fps": (1, MAX_FPS),
    "seed": (0, MAX_SEED),
}
OWN = ("height", "width", "frames", "steps", "guidance")  # fields that may be the pipeline's own values
ARGUMENTS = {  # of a pipeline's call, by the field
    "negative": "negative_prompt",
    "height": "height",
    "width": "width",
    "frames": "num_frames",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoJobRequest:
    """A request for one video. Sizes in pixels; None is the pipeline's own. `fps`: frames in a second of the file.

    Raises PlanError.
    """

    model: str
    prompt: str
    negative: str | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    fps: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise PlanError("there is no video model: give a folder, or a name of the hub")
        if not self.prompt.strip():
            raise PlanError("there is no prompt: describe the video")
        check_text("prompt", self.prompt)
        check_text("negative prompt", self.negative or "")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name, (least, limit) in LIMITS.items():
            value = getattr(self, name)
            if value is not None or name in ("fps", "seed"):
                check_whole(name, value, least, limit)
        if self.height and self.width and self.height * self.width > MAX_PIXELS:
            raise PlanError(f"{self.height} x {self.width} pixels: at most {MAX_PIXELS} in all, as 4096 x 4096")
        if self.guidance is not None and not 0 <= self.guidance <= 50:
            raise PlanError(f"guidance scale {self.guidance:g}: it is a number from 0 to 50")

    @classmethod
    def of(cls, **fields: Any) -> "VideoJobRequest":
        """From the fields of a page, where 0 is the pipeline's own value. Raises PlanError."""
        texts: dict[str, Any] = {name: (fields[name] or "").strip() for name in ("model", "prompt")}
        own: dict[str, Any] = {name: as_whole(fields[name]) or None for name in OWN}
        return cls(
            **texts,
            **own,
            fps=as_whole(fields["fps"]),
            seed=as_whole(fields["seed"]),
            negative=fields["negative"] or None,
        )

    def arguments(self, known: Any) -> dict[str, Any]:
        """Arguments of the pipeline's call. `known`: names of the arguments that it takes. Raises PlanError."""
        from torch import Generator

        given = {to: getattr(self, name) for name, to in ARGUMENTS.items() if getattr(self, name) is not None}
        unknown = [to for to in given if to not in known]
        if unknown:
            raise PlanError(f"this model takes no {unknown[0]}: leave that field empty, or at 0")
        return {"prompt": self.prompt, **given, "generator": Generator("cpu").manual_seed(self.seed)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoJobResult:
    """A file, how many frames it has, and the run."""

    path: Path
    frames: int
    run: Run
    why: str


def generate_video(
    runner: ImageJobRunner, job: Job, request: VideoJobRequest, preset: Preset, folder: Path
) -> VideoJobResult:
    """Generate a video into a folder. Raises PlanError, Cancelled, and what the pipeline raises."""
    job.check()
    job.show(note=f"loading {request.model}")
    pipe = runner.workers.video_pipeline(request.model, preset)
    arguments = request.arguments(pipe.description.parameters)
    with runner.watched(pipe, job, RunOptions(title="generating"), (1, 1)) as call:
        output = pipe(**arguments, **call.arguments)
    job.show(note="writing the file", step=0)
    frames_FHWC = frames_of(output)
    assert frames_FHWC is not None, "of the rank that has the result"
    height, width = frames_FHWC.shape[1:3]
    if height % 2 or width % 2:
        raise PlanError(f"its frames are {width} x {height}, but video codecs need even sides: change width or height")
    path = folder / NAME
    write_video(frames_FHWC, str(path), request.fps)
    assert pipe.last_run is not None
    return VideoJobResult(path=path, frames=len(frames_FHWC), run=pipe.last_run, why=pipe.explain())
