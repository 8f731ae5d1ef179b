"""A generator that makes images when it is told to, so that queue, HTTP and signals are tested without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from PIL import Image

from patchpar.models.info import PipelineInfo
from patchpar.models.task import PipelineTask
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.serving.generated import GeneratedImages
from patchpar.serving.generation import PoolState
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job import Job
from patchpar.serving.lora_registry import LoraRegistry
from patchpar.serving.partial_images import CompletedImage, ImageFigures, PartialImage
from patchpar.serving.prompt_tokens import PromptTokens
from patchpar.serving.rank_pings import RankPings
from patchpar.serving.rank_pool import RankPool
from patchpar.serving.settings import ServedModel

SECONDS = 20.0
DEFAULTS: Mapping[str, Any] = {
    "prompt": None,
    "height": None,
    "width": None,
    "num_inference_steps": 50,
    "guidance_scale": 5.0,
    "negative_prompt": None,
}
MODEL = PipelineInfo(
    pipeline="FakePipeline",
    module="fake",
    denoisers=("unet (Fake)",),
    splits_into_bands=True,
    splits_into_tokens=False,
    total_stride=4,
    vae_scale=8,
    size_unit=8,
    parameters=DEFAULTS,
    takes_any=False,
    distilled=False,
    default_size=(256, 256),
    methods=frozenset(),
    networks={},
)


class FakeGenerator:
    """Stands for ImageGenerator. While `gate` is closed a call runs until it is cancelled; `error` is raised by one."""

    def __init__(self, served: ServedModel | None = None) -> None:
        self.served = served or ServedModel(model="/models/fake", devices=("cpu",))
        self.state: PoolState = "loading"
        self.silent: set[int] = set()
        self.pings = RankPings(self._ping, len(self.served.devices))
        self.ranks = RankPool(len(self.served.devices), self.pings)
        self.task: PipelineTask | None = None
        self.scheduler: Any = None
        self.tokens: PromptTokens | None = None
        self.loras = LoraRegistry()
        self.pipe: Any = None
        self.makes_videos = self.can_batch = False
        self.why_no_decoder = ""
        self.description = MODEL
        self.gate, self.started = threading.Event(), threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.calls: list[ImageCall] = []
        self.warmed = 0
        self.may_warm = threading.Event()
        self.may_warm.set()
        self.is_closed = False

    def open(self) -> None: ...

    def warm_up(self, job: Job) -> None:
        assert self.may_warm.wait(SECONDS)
        self.warmed += 1
        self.state = "ready"

    def repair(self, job: Job) -> None:
        self.warm_up(job)

    def _ping(self, rank: int, is_cancelled: Any) -> None:
        while rank in self.silent and not is_cancelled():
            time.sleep(0.005)

    def generate(self, job: Job, call: ImageCall) -> GeneratedImages:
        self.calls.append(call)
        self.started.set()
        self.loras.adapters(call.loras)
        error, self.error = self.error, None
        if error is not None:
            self.state = "lost"
            raise error
        while not self.gate.wait(0.005):
            job.check()
        run = Run(plan=Plan(), seconds=0.25, ranks=())
        completed = []
        for number in range(call.count):
            image = Image.new("RGB", call.size)
            for index in range(call.partial_images):
                job.send(PartialImage(image_index=number, index=index, image=image))
            figures, reason = ImageFigures.of(run), "there is one device"
            completed.append(
                CompletedImage(image_index=number, image=image, figures=figures, reason=reason, prompt_tokens=3)
            )
            job.send(completed[-1])
        return GeneratedImages(tuple(completed), (run,) * call.count)

    def close(self) -> None:
        self.is_closed = True
