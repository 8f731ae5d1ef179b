"""What one rank of a stream does: loads what its stage needs, and runs its stage for as long as a stream lasts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport, connect, watched
from patchpar.launch.executor import IdleRank, InteractiveRankContext
from patchpar.models.quiet_libraries import hush
from patchpar.plan.mesh import Axis
from patchpar.stream.audio.conditioner import CONFIG as AUDIO_FILE
from patchpar.stream.audio.conditioner import AudioConditioner
from patchpar.stream.causal.causal_wan import CausalWan
from patchpar.stream.causal.checkpoint import RequiredWeights, load_wan
from patchpar.stream.causal.decoder import WanDecoder, from_pixels
from patchpar.stream.causal.step_sharding import StepGroup, check_inner
from patchpar.stream.causal.wan import LowNoiseTransformer, WanStream, WanStreamOptions
from patchpar.stream.config import StreamConfig
from patchpar.stream.events import Change, Prompt, Reference
from patchpar.stream.messages import ModelFacts, PromptUpdate, ReferenceUpdate, StreamRun, Update
from patchpar.stream.model_index import HIGH_NOISE, LOW_NOISE, low_noise_below
from patchpar.stream.plan import StreamPlan
from patchpar.stream.stage import StageLoop, StageStats
from patchpar.stream.stage_io import RankStageIO

THROUGH = "shared_memory"
"""Not NCCL, which keeps the order of all messages of a rank: one that is expected early would hold up those we send."""

FILM_CHUNKS = 20
"""Chunks of 4 pictures behind a reference: films of 81 pictures are what such models were trained on."""


class StreamRunner:
    """One rank."""

    def __init__(self, context: InteractiveRankContext) -> None:
        self._context = context
        self._device = torch.device(context.device)
        self._transport: Transport | None = None
        self._door: Communicator | None = None
        self._pipe: Any = None
        self._networks: list[CausalWan] = []
        self._decoder: WanDecoder | None = None
        if context.world_size > 1:  # before anything of a model arrives: unpickling it imports what talks
            hush()

    def load(
        self, folder: str, config: StreamConfig, plan: StreamPlan, options: Mapping[str, Any]
    ) -> ModelFacts | IdleRank | None:
        """Load from a WanPipeline folder what this rank's stage needs. Raises UnsupportedModel, PlanError."""
        self._config, self._plan = config, plan
        rank = self._context.rank
        if self._context.world_size > 1 and self._transport is None:
            with self._context.waiting:
                self._transport = connect(self._context, through=THROUGH)
            self._door = Communicator(self._transport, self._context.mark)
        if rank >= plan.ranks:
            return IdleRank()
        stage = plan.stages[plan.stage_of(rank)]
        boundary = low_noise_below(Path(folder))
        self._above = config.schedule.steps_above(-1.0 if boundary is None else boundary)
        needs = RequiredWeights(
            text=rank == 0, vae=rank in (0, plan.decoder), transformers=_parts(stage.steps, self._above)
        )
        self._pipe = pipe = load_wan(Path(folder), needs, options)
        drawing = [getattr(pipe, part) for part in needs.transformers]
        for network in (pipe.vae, pipe.text_encoder, *drawing):
            if network is not None:
                network.to(self._device)
        transformers = drawing or [pipe.transformer]
        check_inner(plan.inner, heads=transformers[0].config.num_attention_heads)
        inner = self._inner(stage.ranks) if len(stage.ranks) > 1 else None
        ears = self._ears(Path(folder), transformers[0].dtype)
        self._networks = [CausalWan(transformer.eval(), config.blocks, ears, inner) for transformer in transformers]
        self._decoder = None if pipe.vae is None else WanDecoder(pipe.vae)
        return self._facts() if rank == 0 else None

    def _inner(self, ranks: range) -> StepGroup:
        """Our place among the ranks of a stage."""
        assert self._door is not None, "several ranks have a door"
        return StepGroup(self._door, Axis("inner", ranks.index(self._context.rank), len(ranks), tuple(ranks)))

    def _ears(self, folder: Path, dtype: torch.dtype) -> AudioConditioner | None:
        if not (folder / "transformer" / AUDIO_FILE).is_file():
            return None
        return AudioConditioner.load(folder / "transformer").to(self._device, dtype)

    def _facts(self) -> ModelFacts:
        ears = self._networks[0].audio
        vae = self._pipe.vae.config
        return ModelFacts(
            audio=None if ears is None else ears.config,
            per_latent=int(vae.scale_factor_temporal),
            spatial=int(vae.scale_factor_spatial),
            speaks=self._pipe.text_encoder is not None,
            draws_from_pictures=self._draws_from_pictures,
        )

    def run(self, course: StreamRun) -> StageStats | IdleRank:
        """This rank's part of one stream, to its end. Raises ExchangeError if another rank is late or gone."""
        if self._context.rank >= self._plan.ranks:
            return IdleRank()
        if self._transport is not None:
            watched(self._transport, self._context)
        if self._draws_from_pictures:  # which is its sink for good
            course = replace(course, adapt_sink=False)
        around = RankStageIO(self._context, course, self._resolved).surroundings()
        loop = StageLoop(self._model(course), self._plan, self._context.rank, self._door, around, course.first_block)
        return loop.run()

    @property
    def _draws_from_pictures(self) -> bool:
        config = self._networks[0].transformer.config
        return bool(config.in_channels > config.out_channels)

    def _model(self, course: StreamRun) -> WanStream:
        network, *low = self._networks
        options = WanStreamOptions(
            height=course.rows,
            width=course.columns,
            seed=course.seed,
            text=torch.zeros(1, self._config.text_tokens, network.transformer.config.text_dim),
            adapt_sink=course.adapt_sink,
        )
        low_noise = LowNoiseTransformer(network=low[0], start=self._above.stop) if low else None
        return WanStream(network, self._config.schedule, self._decoder, options, low_noise)

    @torch.no_grad()
    def _resolved(self, wish: Update) -> Change:
        """Text and pictures as what the stages take."""
        if isinstance(wish, PromptUpdate):
            text, _ = self._pipe.encode_prompt(
                wish.text,
                do_classifier_free_guidance=False,
                max_sequence_length=self._config.text_tokens,
                device=self._device,
            )
            return Prompt(text=text, transition=wish.transition, over=wish.over)
        if isinstance(wish, ReferenceUpdate):
            assert self._decoder is not None
            picture = from_pixels(wish.picture).to(self._device)
            film = self._decoder.encode(picture, chunks=FILM_CHUNKS) if self._draws_from_pictures else None
            return Reference(latents=self._decoder.encode(picture), film=film)
        return wish


def _parts(steps: range, above: range) -> tuple[str, ...]:
    """The transformers of these steps, of which those in `above` are of high noise."""
    high, low = steps.start < above.stop, steps.stop > above.stop
    return ((HIGH_NOISE,) if steps and high else ()) + ((LOW_NOISE,) if steps and low else ())
