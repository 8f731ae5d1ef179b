"""Workers that generate at once, so that all but the generating can be tested without them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from app.presets import Preset, presets_for
from app.workers import AppConfig, set_preset
from patchpar import Plan
from patchpar.pipeline.rank_stats import RankStats
from patchpar.pipeline.report import Run

PARAMETERS = ("prompt", "negative_prompt", "height", "width", "guidance_scale", "callback_on_step_end")


class FakePipeline:
    """Stands for ParallelPipeline of two devices."""

    def __init__(self, *, has_callback: bool = True, more: tuple[str, ...] = ()) -> None:
        self.has_callback, self.more = has_callback, more
        self.calls: list[dict[str, Any]] = []
        self.plans: list[Any] = []
        self.on_step: Any = None
        self.on_latents: Any = None
        self.tracing = False
        self.last_run: Run | None = None
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    @property
    def plan(self) -> Any:
        return self.plans[-1] if self.plans else "auto"

    @plan.setter
    def plan(self, plan: Any) -> None:
        self.plans.append(plan)

    @property
    def description(self) -> Any:
        known = [name for name in PARAMETERS if self.has_callback or name != "callback_on_step_end"]
        return SimpleNamespace(
            pipeline="Fake",
            parameters=dict.fromkeys([*known, *self.more]),
            latent_channels=4,
            vae_scale=4,
            default_size=(64, 64),
            few_steps=None,
        )

    def restore(self) -> None:
        self.plans.append("restored")

    def explain(self) -> str:
        return f"2 CPU workers; plan {self.plan}: as requested"

    def _call(self, rule: Any, args: tuple[()], arguments: dict[str, Any]) -> Any:
        """As `upscale` does."""
        return self(**arguments)

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        latents = torch.zeros(1, 4, 16, 16)
        for step in range(arguments["num_inference_steps"]):
            assert self.go.wait(10)
            if self.on_step is not None:
                self.on_step(step + 1, arguments["num_inference_steps"])
            if self.on_latents is not None:
                self.on_latents(step + 1, arguments["num_inference_steps"], latents)
            if "callback_on_step_end" in arguments:
                arguments["callback_on_step_end"](self, step, 0, {"latents": latents})
            if self.error is not None:
                raise self.error
        seed = arguments["generator"].initial_seed() if "generator" in arguments else 0
        image = arguments.get("image")
        values = np.random.default_rng(seed).random((64, 64, 3) if image is None else (image.height, image.width, 3))
        if self.plan == "restored":
            values = np.clip(values + 0.01, 0, 1)
        figures: dict[str, Any] = {"bytes_sent": {}, "bytes_received": {}, "seconds_waited": {}}
        self.last_run = Run(plan=Plan(), seconds=0.5, ranks=(RankStats(rank=0, device="cpu", **figures),))
        if arguments.get("output_type") == "np":
            return SimpleNamespace(images=[values])
        from patchpar.pipeline.image_metrics import as_image

        return SimpleNamespace(images=[as_image(values)])


class FakeWorkers:
    """Stands for AppWorkers."""

    def __init__(self, pipe: FakePipeline, count: int = 2) -> None:
        self.pipe, self.count, self.setup = pipe, count, AppConfig()
        self.streamed: list[dict[str, Any]] = []
        self.closed, self.may_change = False, False

    @property
    def presets(self) -> tuple[Preset, ...]:
        return presets_for(self.count)

    def image_pipeline(self, preset: Preset | None = None) -> Any:
        if preset is not None:
            set_preset(self.pipe, preset, self.count)  # type: ignore[arg-type]
        return self.pipe

    @property
    def model(self) -> Any:
        return self.loaded_model()

    def loaded_model(self) -> Any:
        return self.pipe.description

    def upscaler(self) -> Any:
        return self.pipe

    def inpainter(self) -> Any:
        return self.pipe

    def image_stream(self, *, takes_image: bool) -> Any:
        return FakeStreams(self, takes_image)

    def close(self) -> None:
        self.closed = True


class FakeStreams:
    """Stands for ImageStreamingPipeline: every image is grey, as bright as its number."""

    def __init__(self, workers: FakeWorkers, takes_image: bool) -> None:
        self._workers, self._takes_image = workers, takes_image

    @contextmanager
    def stream(self, **arguments: Any) -> Iterator[Any]:
        yield FakeSession(self._workers, {"takes_image": self._takes_image, **arguments})


class FakeSession:
    """Stands for ImageSession."""

    def __init__(self, workers: FakeWorkers, arguments: dict[str, Any]) -> None:
        self._workers, self._arguments = workers, arguments

    def set(self, **arguments: Any) -> None:
        self._arguments.update(arguments)

    def map(self, requests: Any) -> Iterator[Any]:
        from PIL import Image

        for number, request in enumerate(requests):
            self._workers.streamed.append({**self._arguments, **request})
            yield SimpleNamespace(number=number, image=Image.new("RGB", (32, 32), (number,) * 3), latency=0.25)
