"""Pipelines of the jobs: one set of devices, opened on first use, used by the job queue's thread only.

Images and one other pipeline stay side by side on the CPU; on GPUs, whose memory is dear, one makes room for the
other.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from patchpar import ImageStreamingPipeline, ParallelPipeline, PlanError, StreamingPipeline
from patchpar.launch.accelerators import is_accelerator
from patchpar.launch.devices import Devices, resolve_devices
from patchpar.launch.host_memory import free_memory
from patchpar.models.files import EMBEDDED, check_memory, needed_bytes, resolve_model
from patchpar.models.info import PipelineInfo
from patchpar.models.task import RequestedTask, purpose_of

from .presets import Preset, plain, presets_for

IMAGES = "images"
TASK = RequestedTask(verb="app")
VIDEOS = RequestedTask(verb="app", product="video")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """Configuration of the app. `face`: folder or name of a talking-face model, if there is one.

    `options` go to diffusers' from_pretrained. `deadline`: seconds without a sign of life from a rank.
    `chooses_models`: whether pages may load another model, whatever folder or name of the hub.
    """

    model: str = "embedded"
    devices: Devices = field(default_factory=lambda: devices_of("auto"))
    face: str | Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    deadline: float = 60.0
    chooses_models: bool = False

    @property
    def opening(self) -> dict[str, Any]:
        """Keyword arguments of every from_pretrained."""
        return {"devices": list(self.devices.names), "deadline": self.deadline}

    @property
    def host_bytes(self) -> int:
        """Weights of all ranks on the CPU in bytes; 0 of a name of the hub, whose size is unknown. Raises PlanError."""
        _, options, folder = resolve_model(self.model, self.options)
        return self.devices.names.count("cpu") * needed_bytes(folder, options)

    def check(self, task: RequestedTask = TASK, freed: int = 0) -> None:
        """Raise PlanError for a model that does not exist or does not fit into memory, before anything is started.

        `freed`: bytes of host memory that will be free by then.
        """
        task.check_model(self.model, self.options)
        source, options, folder = resolve_model(self.model, self.options)
        if not freed or self.host_bytes > (free_memory() or 0) + freed:
            check_memory(source, folder, options, self.devices.names)


def devices_of(text: str) -> Devices:
    """The devices that `--devices` means; without a GPU, "auto" is two CPU workers. Raises PlanError."""
    found = resolve_devices(text)
    return resolve_devices("cpu:2") if text == "auto" and found.names == ("cpu",) else found


@dataclass(frozen=True, slots=True)
class OpenPipeline:
    """A pipeline, and how many bytes of host memory its weights take; 0 where that is not known."""

    pipe: Any
    host_bytes: int


class AppWorkers:
    """Opens and closes pipelines. `shared`: returns that of a server, which is neither opened nor closed here."""

    def __init__(self, setup: AppConfig, shared: Callable[[], ParallelPipeline] | None = None) -> None:
        self.setup, self._shared = setup, shared
        self._open: dict[str, OpenPipeline] = {}
        self.model: PipelineInfo | None = None
        """The text-to-image model; None before it is loaded."""

    def loaded_model(self) -> PipelineInfo:
        """The same, loaded if necessary."""
        return self.model or self.image_pipeline().description

    @property
    def may_change(self) -> bool:
        """Whether pages may load another model: not that of a server."""
        return self._shared is None and self.setup.chooses_models

    def setup_for(self, model: str) -> AppConfig:
        """Configuration with another model. Raises PlanError for one that does not exist, or does not fit."""
        return self._setup_for(model, TASK, self._held(but=""))

    def video_setup(self, model: str) -> AppConfig:
        """The same with a model that generates videos. Raises PlanError."""
        return self._setup_for(model, VIDEOS, self._held(but=IMAGES))

    def _held(self, but: str) -> int:
        """Bytes of host memory of the open pipelines but this one: a further pipeline takes their place."""
        return sum(each.host_bytes for name, each in list(self._open.items()) if name != but)

    def _setup_for(self, model: str, task: RequestedTask, freed: int) -> AppConfig:
        if not self.may_change:
            raise PlanError("this page has the model that its server was started with")
        options = {name: value for name, value in self.setup.options.items() if name != "variant"}
        setup = replace(self.setup, model=model, options={} if model in EMBEDDED else options)
        setup.check(task, freed)
        return setup

    def change(self, setup: AppConfig, load: Callable[[], object]) -> None:
        """Let `load` open another model in place of the one that is open.

        Raises what `load` raises; the first one then comes back at its next use.
        """
        before, known = self.setup, self.model
        self.close()
        gc.collect()
        self.setup, self.model = setup, None
        try:
            load()
        except BaseException:
            self.close()
            self.setup, self.model = before, known
            raise

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.setup.devices.names)

    @property
    def presets(self) -> tuple[Preset, ...]:
        """Presets for this number of devices."""
        return presets_for(self.count)

    def image_pipeline(self, preset: Preset | None = None) -> ParallelPipeline:
        """The text-to-image pipeline, with the preset applied. Raises PlanError."""
        if self._shared is None:
            pipe: ParallelPipeline = self._opened(IMAGES, partial(_opened_checked, self.setup, TASK), self.setup)
        else:
            pipe = self._shared()
        self.model = pipe.description
        if preset is not None:
            set_preset(pipe, preset, self.count)
        return pipe

    def image_stream(self, *, takes_image: bool) -> ImageStreamingPipeline:
        """The image stream pipeline, text-to-image or image-to-image. Raises PlanError."""
        name = f"stream of images from {'images' if takes_image else 'prompts'}"
        opened = {"takes_image": takes_image, **self.setup.options, **self.setup.opening}
        opening = partial(ImageStreamingPipeline.from_pretrained, self.setup.model, **opened)
        return self._opened(name, opening, self.setup)

    def upscaler(self) -> ParallelPipeline:
        """The image-to-image pipeline. Raises PlanError where the model's family has none."""
        return self._opened("enlarging", partial(_opened_parallel, self.setup, task="image-to-image"), self.setup)

    def inpainter(self) -> ParallelPipeline:
        """The inpainting pipeline. Raises PlanError where the model's family has none."""
        return self._opened("inpainting", partial(_opened_parallel, self.setup, task="inpainting"), self.setup)

    def video_pipeline(self, model: str, preset: Preset) -> ParallelPipeline:
        """The pipeline of a model that generates videos, with the preset applied. Raises PlanError."""
        setup = self.video_setup(model)
        pipe: ParallelPipeline = self._opened(f"videos of {model}", partial(_opened_checked, setup, VIDEOS), setup)
        set_preset(pipe, preset, self.count)
        return pipe

    def face_stream(self) -> StreamingPipeline:
        """The talking-face pipeline. Raises PlanError without a model for it."""
        return self._opened("stream of a face", self._open_face)

    def close(self) -> None:
        """End all workers. Idempotent."""
        while self._open:
            _, found = self._open.popitem()
            found.pipe.close()

    def _opened(self, name: str, opening: Callable[[], Any], setup: AppConfig | None = None) -> Any:
        """The pipeline of this name. `setup`: of its model; None where its size is not known."""
        if name not in self._open:
            is_dear = any(map(is_accelerator, self.setup.devices.names))
            for other in list(self._open):
                if is_dear or other != IMAGES:
                    self._open.pop(other).pipe.close()
            gc.collect()
            self._open[name] = OpenPipeline(opening(), 0 if setup is None else setup.host_bytes)
        return self._open[name].pipe

    def _open_face(self) -> StreamingPipeline:
        if self.setup.face is None:
            raise PlanError("no talking-face model is loaded: start the app with --face FOLDER")
        return StreamingPipeline.from_pretrained(self.setup.face, **self.setup.opening)


def _opened_parallel(setup: AppConfig, **options: Any) -> ParallelPipeline:
    pipe = ParallelPipeline.from_pretrained(setup.model, **setup.opening, **{**setup.options, **options})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _opened_checked(setup: AppConfig, task: RequestedTask) -> ParallelPipeline:
    pipe = _opened_parallel(setup)
    try:
        task.check(purpose_of(pipe.description.pipeline))  # a model of the hub is known only after loading
    except PlanError:
        pipe.close()
        raise
    return pipe


def set_preset(pipe: ParallelPipeline, preset: Preset, count: int) -> None:
    """Apply a preset to the pipeline. Raises PlanError."""
    if preset == plain() and count > 1:
        pipe.restore()
    else:
        pipe.plan = preset.plan(count)
