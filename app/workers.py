"""The pipelines that jobs work with: one set of devices, opened when first needed, used by the desk's thread only.

Pictures and one stream stay side by side on the CPU; on GPUs, whose memory is dear, one makes room for the other.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchpar import ParallelPipeline, PictureStreamingPipeline, PlanError, StreamingPipeline
from patchpar.launch.devices import Devices, resolve_devices
from patchpar.models.folder import resolve_model

from .ways import Way, plain, ways_for

PICTURES = "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the page works with. `face`: the folder of a model that streams with sound, if there is one.

    `options` go to diffusers' from_pretrained.
    """

    model: str = "embedded"
    devices: Devices = field(default_factory=lambda: devices_of("auto"))
    face: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise PlanError for a model that is none, before anything is started."""
        resolve_model(self.model, self.options)

    @property
    def side(self) -> int:
        """Pixels of a side that the page begins with."""
        return 256 if self.model.startswith("embedded") else 1024


def devices_of(text: str) -> Devices:
    """The devices that `--devices` means; without a GPU, "auto" is two CPU workers. Raises PlanError."""
    found = resolve_devices(text)
    return resolve_devices("cpu:2") if text == "auto" and found.names == ("cpu",) else found


class Workers:
    """Opens and closes pipelines."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._open: dict[str, Any] = {}
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The Description of the model for pictures; None before it has been loaded."""
        return self._model

    def described(self) -> Any:
        """The same, loaded if need be."""
        if self._model is None:
            self.pictures()
        return self._model

    @property
    def count(self) -> int:
        """How many devices there are."""
        return len(self.setup.devices.names)

    @property
    def ways(self) -> tuple[Way, ...]:
        """How that many devices can draw a picture."""
        return ways_for(self.count)

    def pictures(self, way: Way | None = None) -> ParallelPipeline:
        """The pipeline for pictures, set to draw in this way. Raises PlanError."""
        pipe: ParallelPipeline = self._opened(PICTURES, self._open_pictures)
        if way is not None:
            set_way(pipe, way, self.count)
        return pipe

    def picture_stream(self, task: str | None) -> PictureStreamingPipeline:
        """The pipeline for streams of pictures, out of prompts or ("image-to-image") out of pictures."""
        found: PictureStreamingPipeline = self._opened(f"stream {task}", lambda: self._open_picture_stream(task))
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
        setup = self.setup
        pipe = ParallelPipeline.from_pretrained(setup.model, devices=list(setup.devices.names), **setup.options)
        pipe.set_progress_bar_config(disable=True)
        self._model = pipe._model
        return pipe

    def _open_picture_stream(self, task: str | None) -> PictureStreamingPipeline:
        setup = self.setup
        options = setup.options if task is None else {**setup.options, "task": task}
        return PictureStreamingPipeline.from_pretrained(setup.model, devices=list(setup.devices.names), **options)

    def _open_face(self) -> StreamingPipeline:
        if self.setup.face is None:
            raise PlanError("no model of a face is loaded: start the app with --face FOLDER")
        return StreamingPipeline.from_pretrained(self.setup.face, devices=list(self.setup.devices.names))


def set_way(pipe: ParallelPipeline, way: Way, count: int) -> None:
    """Have the pipeline draw in this way. Raises PlanError."""
    if way == plain() and count > 1:
        pipe.restore()
    else:
        pipe.plan = way.plan(count)
