"""What one rank of a queue of frames does: loads what its zones need, and draws them for as long as a stream lasts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport, connect, watched
from patchpar.errors import PlanError
from patchpar.launch.executor import IdleRank, InteractiveRankContext
from patchpar.models.quiet_libraries import hush
from patchpar.stream.causal.checkpoint import RequiredWeights
from patchpar.stream.causal.runner import THROUGH
from patchpar.stream.events import Change, Prompt
from patchpar.stream.fifo.config import FifoConfig
from patchpar.stream.fifo.ltx import LtxFamily
from patchpar.stream.fifo.model import FifoModel, FifoStreamOptions
from patchpar.stream.fifo.network import ModelFamily, PromptToEncode
from patchpar.stream.fifo.stage import FifoStage
from patchpar.stream.fifo.wan import WanFamily
from patchpar.stream.messages import ModelFacts, PromptUpdate, StreamRun, Update
from patchpar.stream.model_index import HIGH_NOISE, read_index
from patchpar.stream.plan import StreamPlan
from patchpar.stream.stage import StageStats
from patchpar.stream.stage_io import RankStageIO


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoRun(StreamRun):
    """One run of a queue. `negative`: the prompt that guidance leads away from; `guidance_scale`: 1 for none."""

    negative: str = ""
    guidance_scale: float = 1.0


class FifoRunner:
    """One rank."""

    def __init__(self, context: InteractiveRankContext) -> None:
        self._context = context
        self._device = torch.device(context.device)
        self._transport: Transport | None = None
        self._door: Communicator | None = None
        self._pipe: Any = None
        self._course: FifoRun | None = None
        if context.world_size > 1:  # before anything of a model arrives: unpickling it imports what talks
            hush()

    def load(
        self, folder: str, config: FifoConfig, plan: StreamPlan, options: Mapping[str, Any]
    ) -> ModelFacts | IdleRank | None:
        """Load from a pipeline's folder what this rank's zones need. Raises UnsupportedModel, PlanError."""
        self._config, self._plan = config, plan
        rank = self._context.rank
        if self._context.world_size > 1 and self._transport is None:
            with self._context.waiting:
                self._transport = connect(self._context, through=THROUGH)
            self._door = Communicator(self._transport, self._context.mark)
        if rank >= plan.ranks:
            return IdleRank()
        self._family = family = _family_of(Path(folder))
        draws = bool(plan.stages[rank].steps)
        needs = RequiredWeights(text=rank == 0, vae=rank == plan.decoder, transformers=(HIGH_NOISE,) if draws else ())
        pipe = family.load(Path(folder), needs, options)
        facts = family.facts(Path(folder))
        self._network = family.network(pipe.transformer, facts, config.fps)
        self._decoder = None if pipe.vae is None else family.decoder(pipe.vae)
        for network in (pipe.vae, pipe.text_encoder, pipe.transformer if draws else None):
            if network is not None:
                network.to(self._device)
        self._pipe = pipe
        return facts if rank == 0 else None

    def run(self, course: FifoRun) -> StageStats | IdleRank:
        """This rank's part of one stream, to its end. Raises ExchangeError if another rank is late or gone."""
        if self._context.rank >= self._plan.ranks:
            return IdleRank()
        self._course = course
        if self._transport is not None:
            watched(self._transport, self._context)
        around = RankStageIO(self._context, course, self._resolved).surroundings()
        return FifoStage(self._model(course), self._plan, self._context.rank, self._door, around).run()

    def _model(self, course: FifoRun) -> FifoModel:
        options = FifoStreamOptions(
            height=course.rows,
            width=course.columns,
            seed=course.seed,
            guidance_scale=course.guidance_scale,
            first_frame=course.first_block,
        )
        return FifoModel(self._network, self._decoder, self._config.queue, options)

    @torch.no_grad()
    def _resolved(self, wish: Update) -> Change:
        """A prompt as embeddings, with the negative one where there is guidance."""
        course = self._course
        assert course is not None, "orders come in a run"
        if not isinstance(wish, PromptUpdate):
            raise PlanError(f"{type(wish).__name__}: all that can change in this stream is its prompt")
        away = course.negative if course.guidance_scale > 1 else None
        asked = PromptToEncode(text=wish.text, negative=away, tokens=self._config.text_tokens)
        text, negative = self._family.encode(self._pipe, asked, self._device)
        return Prompt(text=text, transition=wish.transition, over=wish.over, negative=negative)


def _family_of(folder: Path) -> ModelFamily:
    part = read_index(folder).get(HIGH_NOISE)
    is_ltx = isinstance(part, list) and part[-1] == "LTXVideoTransformer3DModel"
    return LtxFamily() if is_ltx else WanFamily()
