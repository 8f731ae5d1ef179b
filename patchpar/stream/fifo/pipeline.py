"""`FifoStreamingPipeline`: video without end from a model of short videos (FIFO-Diffusion, arXiv:2405.11473)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.slurm import resolve_devices_of_task
from patchpar.models.streaming.config import LONGEST_PROMPT
from patchpar.models.streaming.fifo.queue import FifoConfig
from patchpar.models.streaming.video_folder import LTX, local_folder, read_index, transformer_class
from patchpar.plan.json_fields import number, text
from patchpar.plan.scalars import plain
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.delivery import Effect, StreamDelivery
from patchpar.stream.events import Transition
from patchpar.stream.messages import PromptUpdate
from patchpar.stream.session import StreamSession
from patchpar.stream.worker_group import ModelLoading, VideoStreamingPipeline, WorkerGroup, with_default_dtype

ENGINE = "patchpar.stream.fifo.runner:FifoRunner"
WAN = "WanTransformer3DModel"
MOST_GUIDANCE = 1000.0


class FifoSession(StreamSession):
    """One FIFO stream. Only its prompt can change, from the next frame that enters the queue on.

    `blends`: see ModelFacts.
    """

    blends = True

    def set_prompt(
        self, text: str, *, at: int | None = None, transition: Transition = "switch", over: int = 0
    ) -> Effect:
        """Set another prompt for all frames in the queue, from the tick on in which block `at` enters it.

        `transition`: "switch", or "blend" in `over` ticks. Returns the block that enters. Frames that are in the queue
        come out before it; the later they are, the more they show the new prompt. Raises PlanError.
        """
        if transition in ("cut", "recache"):
            raise PlanError(f"transition={transition!r}: this stream has no window to clear: use 'switch' or 'blend'")
        if transition == "blend" and not self.blends:
            raise PlanError("transition='blend': this model's prompts differ in length: use 'switch'")
        return super().set_prompt(text, at=at, transition=transition, over=over)

    def set_param(self, name: str, value: float, *, at: int | None = None) -> Effect:
        """Raise PlanError: a FIFO stream has no parameters."""
        raise PlanError(f"{name!r}: only the prompt of this stream can change")

    def set_reference(self, reference: Any, *, at: int | None = None) -> Effect:
        """Raise PlanError: a FIFO stream has no reference."""
        raise PlanError("this stream takes no reference: only its prompt can change")


class FifoStreamingPipeline(VideoStreamingPipeline[FifoConfig, FifoSession]):
    """A model of short videos that streams. Made by `from_pretrained`; a context manager."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        devices: object = "auto",
        plan: StreamPlan | None = None,
        config: FifoConfig | None = None,
        deadline: float = 600.0,
        **options: Any,
    ) -> "FifoStreamingPipeline":
        """Load a text-to-video pipeline, a folder or a name of the hub.

        Wan 2.1, Wan 2.2 of 5 billion weights, or LTX-Video.

        `devices`: see ParallelPipeline. `plan`: zones by rank, as steps of a StreamPlan; even by default.
        `deadline`: seconds that a rank may wait for another. Other options are those of diffusers' from_pretrained; the
        dtype is bfloat16 by default on accelerators. Raises PlanError, UnsupportedModel, LaunchError.
        """
        path, options = local_folder(folder, options)
        _check_kind(str(folder), path)
        config = config or FifoConfig()
        found, zones = resolve_devices_of_task(devices), config.queue.zones
        plan = plan or StreamPlan.on_devices(zones, len(found.names))
        if plan.ranks > len(found.names) or plan.steps != zones or plan.inner > 1:
            raise PlanError(
                f"a plan of {plan.steps} zones with {plan.ranks} ranks, {plan.inner} for each, does not fit a queue of "
                f"{zones} zones on {len(found.names)} devices ({found.note}), 1 rank for each"
            )
        options = with_default_dtype(options, found.names)
        loading = ModelLoading(
            folder=str(path), config=config, options=options, devices=found.names, deadline=deadline, engine=ENGINE
        )
        ranks, facts = loading.start(plan, found.names)
        return cls(WorkerGroup(ranks, plan, loading), config, facts)

    def stream(
        self,
        prompt: str,
        *,
        negative_prompt: str = "",
        guidance_scale: float = 5.0,
        seed: int = 0,
        seconds: float | None = None,
        delivery: StreamDelivery | None = None,
    ) -> FifoSession:
        """Begin a stream. Only one stream runs at a time; use it in a `with` block. A chunk is one latent frame.

        The first chunk comes after a whole short video has been denoised and its first frame has passed the queue.
        `guidance_scale`: 1 for no guidance, with half the work. `seconds`: length; None for no end. Raises PlanError.
        """
        config, facts = self.config, self._facts
        with self._begun() as workers:
            run = self._stream_run(seed, adapt_sink=False)
            delivery = delivery or StreamDelivery()
            if delivery.record is not None:
                raise PlanError(
                    f"record={str(delivery.record)!r}: a FIFO stream cannot be recorded: run it again with the same "
                    "prompts and seed for the same frames"
                )
            if delivery.keep_alive:
                raise PlanError("keep_alive=True: this stream takes no audio: leave it out")
            text("negative_prompt", negative_prompt, LONGEST_PROMPT)
            number("guidance_scale", plain(guidance_scale), 0, MOST_GUIDANCE)
            form = self._format(delivery.fps or config.fps, 1)
            credit = config.queue.levels + facts.late + self.plan.depth + delivery.lead
            run = replace(run, negative=negative_prompt, guidance_scale=guidance_scale)
            self._session = FifoSession(
                workers.run, (run,), form, delivery, None, credit=credit, blocks=form.blocks(seconds)
            )
            self._session.blends = facts.blends
            self._session.begin(PromptUpdate(text=prompt))
            return self._session

    def __repr__(self) -> str:
        queue = self.config.queue
        return f"<FifoStreamingPipeline, {queue.levels} frames in {queue.zones} zones, {self.plan}>"


def _check_kind(name: str, folder: Path) -> None:
    """Raise UnsupportedModel for a model of another kind. Causal models of Wan have the name of its class as an end."""
    kind = transformer_class(folder)
    if kind != LTX and not kind.endswith(WAN):
        raise UnsupportedModel(
            f"{name} is a {read_index(folder).get('_class_name')}: a queue of frames is denoised by text-to-video "
            "models of Wan 2.1, Wan 2.2 with 5 billion weights, or LTX-Video: give the folder or the hub name of one, "
            "such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        )
