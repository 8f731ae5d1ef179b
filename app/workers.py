"""The pipelines that jobs work with: one set of devices, opened when first needed, used by the desk's thread only.

Pictures and one other pipeline stay side by side on the CPU; on GPUs, whose memory is dear, one makes room for the
other.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchpar import ImageStreamingPipeline, ParallelPipeline, PlanError, StreamingPipeline
from patchpar.launch.devices import Devices, resolve_devices
from patchpar.models.files import check_memory, needed_bytes, resolve_model
from patchpar.models.info import PipelineInfo
from patchpar.models.task import purpose_of
from patchpar.models.task_check import RequestedTask

from .ways import Preset, plain, ways_for

PICTURES = "pictures"
ERRAND = RequestedTask(verb="app")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """What the page works with. `face`: a model that streams with sound, its folder or name, if there is one.

    `options` go to diffusers' from_pretrained. `deadline`: seconds that a rank may stand still.
    """

    model: str = "embedded"
    devices: Devices = field(default_factory=lambda: devices_of("auto"))
    face: str | Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    deadline: float = 60.0

    @property
    def opening(self) -> dict[str, Any]:
        """Keyword arguments of every from_pretrained."""
        return {"devices": list(self.devices.names), "deadline": self.deadline}

    def check(self) -> None:
        """Raise PlanError for a model that is none or has no room here, before anything is started."""
        ERRAND.check_model(self.model, self.options)
        source, options, folder = resolve_model(self.model, self.options)
        check_memory(source, needed_bytes(folder, options), self.devices.names)


def devices_of(text: str) -> Devices:
    """The devices that `--devices` means; without a GPU, "auto" is two CPU workers. Raises PlanError."""
    found = resolve_devices(text)
    return resolve_devices("cpu:2") if text == "auto" and found.names == ("cpu",) else found


class AppWorkers:
    """Opens and closes pipelines."""

    def __init__(self, setup: AppConfig) -> None:
        self.setup = setup
        self._open: dict[str, Any] = {}
        self._model: PipelineInfo | None = None

    @property
    def model(self) -> PipelineInfo | None:
        """The model for pictures; None before it has been loaded."""
        return self._model

    def described(self) -> PipelineInfo:
        """The same, loaded if need be."""
        return self._model or self.pictures().description

    @property
    def count(self) -> int:
        """How many devices there are."""
        return len(self.setup.devices.names)

    @property
    def ways(self) -> tuple[Preset, ...]:
        """How that many devices can draw a picture."""
        return ways_for(self.count)

    def pictures(self, way: Preset | None = None) -> ParallelPipeline:
        """The pipeline for pictures, set to draw in this way. Raises PlanError."""
        pipe: ParallelPipeline = self._opened(PICTURES, self._open_pictures)
        if way is not None:
            set_way(pipe, way, self.count)
        return pipe

    def picture_stream(self, *, takes_image: bool) -> ImageStreamingPipeline:
        """The pipeline for streams of pictures, out of prompts or out of pictures. Raises PlanError."""
        name = f"stream of pictures from {'pictures' if takes_image else 'prompts'}"
        found: ImageStreamingPipeline = self._opened(name, lambda: self._open_picture_stream(takes_image))
        return found

    def enlarging(self) -> ParallelPipeline:
        """The pipeline that begins with a picture. Raises PlanError where the model's family has none."""
        found: ParallelPipeline = self._opened("enlarging", self._open_enlarging)
        return found

    def face_stream(self) -> StreamingPipeline:
        """The pipeline of a face that talks. Raises PlanError without a model for it."""
        found: StreamingPipeline = self._opened("stream of a face", self._open_face)
        return found

    def close(self) -> None:
        """End all workers. Idempotent."""
        while self._open:
            _, pipe = self._open.popitem()
            pipe.close()

    def _opened(self, name: str, opening: Callable[[], Any]) -> Any:
        if name not in self._open:
            is_dear = any(device.startswith("cuda") for device in self.setup.devices.names)
            for other in list(self._open):
                if is_dear or other != PICTURES:
                    self._open.pop(other).close()
            gc.collect()
            self._open[name] = opening()
        return self._open[name]

    def _open_pictures(self) -> ParallelPipeline:
        pipe = self._open_parallel()
        try:
            ERRAND.check(purpose_of(pipe.description.pipeline))  # of a model of the hub nothing was known before
        except PlanError:
            pipe.close()
            raise
        self._model = pipe.description
        return pipe

    def _open_enlarging(self) -> ParallelPipeline:
        return self._open_parallel(task="image-to-image")

    def _open_parallel(self, **options: Any) -> ParallelPipeline:
        setup = self.setup
        pipe = ParallelPipeline.from_pretrained(setup.model, **setup.opening, **{**setup.options, **options})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _open_picture_stream(self, takes_image: bool) -> ImageStreamingPipeline:
        setup = self.setup
        opened = {"takes_image": takes_image, **setup.options}
        return ImageStreamingPipeline.from_pretrained(setup.model, **setup.opening, **opened)

    def _open_face(self) -> StreamingPipeline:
        if self.setup.face is None:
            raise PlanError("no model of a face is loaded: start the app with --face FOLDER")
        return StreamingPipeline.from_pretrained(self.setup.face, **self.setup.opening)


def set_way(pipe: ParallelPipeline, way: Preset, count: int) -> None:
    """Have the pipeline draw in this way. Raises PlanError."""
    if way == plain() and count > 1:
        pipe.restore()
    else:
        pipe.plan = way.plan(count)
