"""What one rank of a queue of frames does: loads what its zones need, and draws them for as long as a stream lasts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.exchange import Door
from patchpar.launch.context import Bystander, ListeningContext
from patchpar.models.hush import hush
from patchpar.stream.checkpoint import Needs, load_wan
from patchpar.stream.decoder import WanDecoder
from patchpar.stream.engine import THROUGH
from patchpar.stream.events import Change, Prompt
from patchpar.stream.fifo import FifoOptions
from patchpar.stream.fifo_model import FifoStreamOptions, WanFifo, check_frames
from patchpar.stream.fifo_stage import FifoStage
from patchpar.stream.model_index import HIGH_NOISE, low_noise_below
from patchpar.stream.plan import StreamPlan
from patchpar.stream.rank_line import RankLine
from patchpar.stream.stage import StageFigures
from patchpar.stream.talk import Course, Facts, Said, Wish
from patchpar.transport import Transport, connect


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoCourse(Course):
    """One run of a queue. `negative`: the prompt that guidance leads away from; `guidance_scale`: 1 for none."""

    negative: str = ""
    guidance_scale: float = 1.0


class FifoEngine:
    """One rank."""

    def __init__(self, context: ListeningContext) -> None:
        self._context = context
        self._device = torch.device(context.device)
        self._transport: Transport | None = None
        self._door: Door | None = None
        self._pipe: WanPipeline | None = None
        self._course: FifoCourse | None = None

    def load(
        self, folder: str, queue: FifoOptions, plan: StreamPlan, text_tokens: int, options: Mapping[str, Any]
    ) -> Facts | Bystander | None:
        """Load from a WanPipeline folder what this rank's zones need. Raises UnsupportedModel, PlanError."""
        self._queue, self._plan, self._text_tokens = queue, plan, text_tokens
        rank = self._context.rank
        if self._context.world_size > 1 and self._transport is None:
            self._transport = connect(self._device, deadline=self._context.deadline, through=THROUGH)
            self._door = Door(self._transport, self._context.mark)
        if rank >= plan.ranks:
            return Bystander()
        _refuse(Path(folder))
        draws = bool(plan.stages[rank].steps)
        needs = Needs(text=rank == 0, vae=rank == plan.decoder, transformers=(HIGH_NOISE,) if draws else ())
        if self._context.world_size > 1:
            hush()
        pipe = load_wan(Path(folder), needs, options)
        check_frames(pipe.transformer)
        for network in (pipe.vae, pipe.text_encoder, pipe.transformer if draws else None):
            if network is not None:
                network.to(self._device)
        self._pipe = pipe
        return _facts(folder) if rank == 0 else None

    def run(self, course: FifoCourse) -> StageFigures | Bystander:
        """This rank's part of one stream, to its end. Raises ExchangeError if another rank is late or gone."""
        if self._context.rank >= self._plan.ranks:
            return Bystander()
        self._course = course
        if self._transport is not None:
            self._transport.deadline = self._context.deadline
        around = RankLine(self._context, course, self._resolved).surroundings()
        return FifoStage(self._model(course), self._plan, self._context.rank, self._door, around).run()

    def _model(self, course: FifoCourse) -> WanFifo:
        pipe = self._pipe
        assert pipe is not None, "load comes before run"
        options = FifoStreamOptions(
            height=course.rows,
            width=course.columns,
            seed=course.seed,
            guidance_scale=course.guidance_scale,
            first_frame=course.first_block,
        )
        return WanFifo(pipe.transformer, None if pipe.vae is None else WanDecoder(pipe.vae), self._queue, options)

    @torch.no_grad()
    def _resolved(self, wish: Wish) -> Change:
        """A prompt as embeddings, with the negative one where there is guidance."""
        pipe, course = self._pipe, self._course
        assert pipe is not None, "load comes before run"
        assert course is not None, "orders come in a run"
        if not isinstance(wish, Said):
            raise PlanError(f"{type(wish).__name__}: all that can change in this stream is its prompt")
        text, negative = pipe.encode_prompt(
            wish.text,
            negative_prompt=course.negative,
            do_classifier_free_guidance=course.guidance_scale > 1,
            max_sequence_length=self._text_tokens,
            device=self._device,
        )
        return Prompt(text=text, transition=wish.transition, over=wish.over, negative=negative)


def _facts(folder: str) -> Facts:
    vae = AutoencoderKLWan.load_config(folder, subfolder="vae")
    return Facts(
        audio=None,
        per_latent=int(vae.get("scale_factor_temporal", 4)),
        spatial=int(vae.get("scale_factor_spatial", 8)),
        speaks=True,
    )


def _refuse(folder: Path) -> None:
    if low_noise_below(folder) is not None:
        raise UnsupportedModel(
            "this pipeline has one transformer for high noise and another for low: windows of a queue see both; load "
            "Wan 2.1, or Wan 2.2 of 5 billion weights"
        )
