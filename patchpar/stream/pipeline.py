"""`StreamingPipeline`: a block-causal model, its denoising steps on ranks of their own, frames as they are made."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.launch.devices import Devices, resolve_devices
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.stream.config import StreamConfig
from patchpar.stream.driver import Limits
from patchpar.stream.plan import StreamPlan
from patchpar.stream.session import StreamDelivery, StreamSession, Timing
from patchpar.stream.talk import Course, Facts, Said, Shown, Wish
from patchpar.stream.track import AudioTrack

ENGINE = "patchpar.stream.engine:StreamEngine"
LOAD_SECONDS = 600.0


class StreamingPipeline:
    """A model that streams. Made by `from_pretrained`; a context manager."""

    def __init__(self, executor: Any, config: StreamConfig, plan: StreamPlan, facts: Facts) -> None:
        self._executor: LocalExecutor | InlineExecutor | None = executor
        self._facts = facts
        self.config, self.plan = config, plan
        self._session: StreamSession | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        devices: object = "auto",
        plan: StreamPlan | None = None,
        config: StreamConfig | None = None,
        deadline: float = 60.0,
        **options: Any,
    ) -> "StreamingPipeline":
        """Load a WanPipeline folder of a block-causal model.

        `devices`: as ParallelPipeline takes them. `plan`: steps by rank; even by default. `config`: how to stream it,
        where the folder has no stream.json. `deadline`: seconds that a rank may wait for another. Other options are
        those of diffusers' from_pretrained. Raises PlanError, UnsupportedModel, LaunchError.
        """
        path = Path(folder).expanduser()
        if not (path / "model_index.json").is_file():
            raise PlanError(f"{path} has no model_index.json: give the folder of a WanPipeline")
        config = config or StreamConfig.load(path)
        found = resolve_devices(devices)
        plan = plan or StreamPlan.even(config.steps, min(len(found.names), config.steps + 1))
        _check(plan, config, found)
        names = found.names[: plan.ranks]
        executor: LocalExecutor | InlineExecutor = InlineExecutor(names[0], ENGINE, deadline=deadline)
        if len(names) > 1:
            executor = LocalExecutor(names, ENGINE, deadline=deadline, preload=["patchpar.stream.engine"])
        try:
            facts = executor.call("load", str(path), config, plan, options, replay=True, expected=LOAD_SECONDS)[0]
        except BaseException:
            executor.close()
            raise
        return cls(executor, config, plan, facts)

    def stream(
        self,
        prompt: str = "",
        *,
        reference: Any = None,
        audio: tuple[Tensor, int] | str | None = None,
        seed: int = 0,
        seconds: float | None = None,
        delivery: StreamDelivery | None = None,
    ) -> StreamSession:
        """Begin a stream. One at a time; use it in a `with` block.

        `reference`: a picture (PIL, or (height, width, 3) in uint8) whose looks the stream keeps. `audio`: (samples,
        rate) for a stream as long as the sound, "live" for `push_audio`, None for silence. `seconds`: how long; without
        it, and without sound that ends, there is no end. Raises PlanError.
        """
        if self._executor is None:
            raise PlanError("this pipeline is closed; make a new one")
        if self._session is not None and self._session.status in ("running", "paused", "degraded"):
            raise PlanError("a stream is running on these ranks: close it first, or make another pipeline")
        if self._session is not None:
            self._session.close()
        if not 0 <= seed < 2**64:
            raise PlanError(f"seed={seed}: it must be at least 0 and below 2**64")
        config, facts = self.config, self._facts
        course = Course(
            ranks=self.plan.ranks,
            seed=seed,
            rows=config.height // facts.spatial,
            columns=config.width // facts.spatial,
            first_block=0,
            adapt_sink=config.adapt_sink,
        )
        timing = Timing(fps=config.fps, frames=config.blocks.frames, per_latent=facts.per_latent)
        delivery = delivery or StreamDelivery()
        credit = self.plan.depth + delivery.lead
        limits = Limits(credit=credit, blocks=_blocks(seconds, timing), restarts=delivery.restarts)
        track = self._track(audio)
        wishes: list[Wish] = [Said(text=prompt)]
        if reference is not None:
            wishes.append(Shown(picture=_picture(reference, config)))
        run = partial(self._executor.call, "run")
        self._session = StreamSession(run, course, limits, timing, delivery, track).begin(*wishes)
        return self._session

    def _track(self, audio: tuple[Tensor, int] | str | None) -> AudioTrack | None:
        """The sound of a stream. A model that hears gets silence where there is none."""
        config = self._facts.audio
        if config is None:
            if audio is not None:
                raise PlanError(
                    "this model was not made to hear: its folder has no transformer/audio.json; leave audio=None"
                )
            return None
        track = AudioTrack(config, self.config.blocks.frames)
        if isinstance(audio, tuple):
            track.push(torch.as_tensor(audio[0]), audio[1])
            track.end()
        elif audio is None:
            track.be_silent()
        elif audio != "live":
            raise PlanError(f"audio={audio!r}: give (samples, rate), 'live', or None")
        return track

    def close(self) -> None:
        """End stream and workers. Idempotent."""
        executor, self._executor = self._executor, None
        if self._session is not None:
            self._session.close()
        if executor is not None:
            executor.close()

    def __repr__(self) -> str:
        return f"<StreamingPipeline, {self.plan}>"

    def __enter__(self) -> "StreamingPipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(plan: StreamPlan, config: StreamConfig, devices: Devices) -> None:
    if plan.steps != config.steps:
        raise PlanError(f"the plan has {plan.steps} steps, but the model has {config.steps}")
    if plan.inner > 1:
        raise PlanError(f"inner={plan.inner}: several ranks for one step can be forecast, but not run: use inner=1")
    if plan.ranks > len(devices.names):
        raise PlanError(
            f"the plan needs {plan.ranks} ranks, but there are {len(devices.names)} devices ({devices.note})"
        )


def _blocks(seconds: float | None, timing: Timing) -> int | None:
    """Blocks that make so many seconds."""
    if seconds is None:
        return None
    if not 0 < seconds < float("inf"):
        raise PlanError(f"seconds={seconds}: it must be above 0; None for a stream without end")
    blocks = 1
    while timing.first_frame(blocks) < math.ceil(seconds * timing.fps):
        blocks += 1
    return blocks


def _picture(reference: Any, config: StreamConfig) -> Tensor:
    """As (height, width, 3) in uint8; a PIL picture is cut and scaled to the stream's size. Raises PlanError."""
    if isinstance(reference, Image.Image):
        reference = np.array(ImageOps.fit(reference.convert("RGB"), (config.width, config.height)))
    picture = torch.as_tensor(reference)
    wanted: Sequence[int] = (config.height, config.width, 3)
    if picture.dtype is not torch.uint8 or tuple(picture.shape) != tuple(wanted):
        raise PlanError(
            f"a reference of shape {tuple(picture.shape)} in {picture.dtype}: give a PIL picture, or "
            f"{tuple(wanted)} in uint8"
        )
    return picture
