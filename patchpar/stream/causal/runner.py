"""Runner of a block-causal stream on one rank: loads the parts that its stage needs, and runs the stage."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn import functional

from patchpar.comm.device_links import DeviceLinks
from patchpar.models.speech.features import FOLDER as SPEECH_FOLDER
from patchpar.models.speech.features import SpeechFeatures
from patchpar.models.speech.frame_packer import NUM_FRAMES
from patchpar.models.speech.parts import SpeechParts
from patchpar.models.streaming.causal.causal_wan import CausalWan, Hearing
from patchpar.models.streaming.causal.speech_wan import SpeechWan
from patchpar.models.streaming.causal.step_sharding import StepGroup, check_inner
from patchpar.models.streaming.checkpoint import RequiredWeights, hearing_of, load_wan
from patchpar.models.streaming.config import CausalOptions
from patchpar.models.streaming.decoder import WanDecoder, from_pixels
from patchpar.models.streaming.model_facts import ModelFacts
from patchpar.models.streaming.video_folder import HIGH_NOISE, LOW_NOISE, low_noise_below
from patchpar.plan.mesh import Axis
from patchpar.plan.stream_plan import StageSteps
from patchpar.shard.host_memory import to_device
from patchpar.stream.causal.clean_history import CleanHistoryStream, RecomputedHistoryStream
from patchpar.stream.causal.stage_loop import StageLoop
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Change, Reference, StepConditions
from patchpar.stream.messages import PromptUpdate, ReferenceUpdate, StreamRun, Update
from patchpar.stream.rank_runner import StageRunner
from patchpar.stream.stage import StageStats
from patchpar.stream.stage_link import connected

HISTORIES: Mapping[str, type[WanStream]] = {
    "noisy": WanStream,
    "clean": CleanHistoryStream,
    "recompute": RecomputedHistoryStream,
}
"""The classes of streams by their history, see CausalOptions."""
TRAINING_CHUNKS = 20
"""Chunks of 4 grey images after a reference: image-to-video models were trained on videos of 81 images."""


class StreamRunner(StageRunner):
    """One rank of a block-causal stream."""

    _stage: StageLoop | None = None

    def _load_stage(self, folder: Path, stage: StageSteps, options: Mapping[str, Any]) -> ModelFacts | None:
        config, plan, rank = self._config, self._plan, self._context.rank
        boundary = low_noise_below(folder)
        self._high_noise = config.schedule.steps_above(-1.0 if boundary is None else boundary)
        decodes_for_itself = config.blocks.history == "recompute"
        needs = RequiredWeights(
            text=rank == 0,
            vae=decodes_for_itself or rank in (0, plan.decoder),
            transformers=_parts(stage.steps, self._high_noise),
        )
        audio = self._audio_of(folder, has_steps=bool(stage.steps))
        self._pipe = pipe = load_wan(folder, needs, options, audio)
        loaded = [getattr(pipe, part) for part in needs.transformers]
        self._to_device(pipe.vae, pipe.text_encoder, *loaded)
        transformers = loaded or [pipe.transformer]
        check_inner(plan.inner, heads=transformers[0].config.num_attention_heads)
        ranks, group = stage.ranks, None
        if len(ranks) > 1:
            group = StepGroup(connected(self._comm), Axis("inner", ranks.index(rank), len(ranks), tuple(ranks)))
        if audio is not None:
            audio.to(self._device if loaded else None, transformers[0].dtype)
        self._networks = [network_of(transformer.eval(), config.blocks, audio, group) for transformer in transformers]
        self._decoder = None if pipe.vae is None else WanDecoder(pipe.vae)
        return self._facts() if rank == 0 else None

    def _links(self) -> DeviceLinks:
        links, finisher = super()._links(), self._plan.finisher  # sends the first block back, for the adaptive sink
        return replace(links, pairs=(*links.pairs, (finisher, 0))) if finisher else links

    def _audio_of(self, folder: Path, *, has_steps: bool) -> Hearing | None:
        """What the model hears with, on the CPU. The rank that begins blocks has wav2vec2."""
        parts = hearing_of(folder, has_weights=has_steps)
        if isinstance(parts, SpeechParts) and self._context.rank == 0:
            facts = parts.config
            parts.features = SpeechFeatures.load(
                folder / SPEECH_FOLDER, rate=facts.rate, layers=facts.layers, features=facts.features
            ).to(self._device)
        return parts

    def _facts(self) -> ModelFacts:
        audio = self._networks[0].audio
        vae = self._pipe.vae.config
        return ModelFacts(
            audio=None if audio is None else audio.config,
            per_latent=int(vae.scale_factor_temporal),
            spatial=int(vae.scale_factor_spatial),
            starts_from_image=self._is_conditioned or self._hears_speech,
            hears_speech=self._hears_speech,
        )

    def _run_stage(self, run: StreamRun) -> StageStats:
        if self._is_conditioned:  # the sink stays the reference
            run = replace(run, adapt_sink=False)
        stage_io = self._stage_io(run)
        if not run.continues:
            self._stage = None  # frees its memory before the next one is made
        if self._stage is None:
            rank, comm = self._context.rank, self._comm
            self._stage = StageLoop(self._model(run), self._plan, rank, comm, stage_io, run)
        if run.continues:
            self._stage.go_on(stage_io, run.first_block)
        return self._stage.run()

    @property
    def _hears_speech(self) -> bool:
        return isinstance(self._networks[0].audio, SpeechParts)

    @property
    def _is_conditioned(self) -> bool:
        config = self._networks[0].transformer.config
        return bool(config.in_channels > config.out_channels)

    def _model(self, run: StreamRun) -> WanStream:
        network, *low = self._networks
        first = StepConditions(text=torch.zeros(1, self._config.text_tokens, network.transformer.config.text_dim))
        low_noise = (self._high_noise.stop, low[0]) if low else None
        schedule = self._config.schedule.begun_at(run.strength)
        return HISTORIES[self._config.blocks.history](network, schedule, self._decoder, run, first, low_noise)

    @torch.no_grad()
    def _resolve(self, update: Update) -> Change:
        if isinstance(update, PromptUpdate):
            return self._encoded(update)
        if isinstance(update, ReferenceUpdate):
            assert self._decoder is not None
            image = from_pixels(to_device(update.image[None], self._device))
            video = self._decoder.encode(image, chunks=TRAINING_CHUNKS) if self._is_conditioned else None
            if self._hears_speech:
                video = self._decoder.encode(image, still=NUM_FRAMES - 1)
            masks = None if update.masks is None else self._by_patches(update.masks)
            return Reference(latents=self._decoder.encode(image), video=video, masks=masks)
        return update

    def _by_patches(self, masks_SHW: Tensor) -> Tensor:
        """Masks [S, rows, columns] of patches, 0 to 1, from those of pixels in uint8."""
        _, rows, columns = self._networks[0].transformer.config.patch_size
        spatial = int(self._pipe.vae.config.scale_factor_spatial)
        height, width = masks_SHW.shape[1:]
        size = height // (spatial * rows), width // (spatial * columns)
        return functional.interpolate(masks_SHW[None].float() / 255, size=size, mode="area")[0]


def network_of(
    transformer: WanTransformer3DModel, options: CausalOptions, audio: Hearing | None, group: StepGroup | None = None
) -> CausalWan:
    """Return the block-causal network of a transformer and what it hears with. Raises UnsupportedModel, PlanError."""
    if isinstance(audio, SpeechParts):
        return SpeechWan(transformer, options, audio, group)
    return CausalWan(transformer, options, audio, group)


def _parts(steps: range, high_noise: range) -> tuple[str, ...]:
    """The transformers that these steps need."""
    high, low = steps.start < high_noise.stop, steps.stop > high_noise.stop
    return ((HIGH_NOISE,) if steps and high else ()) + ((LOW_NOISE,) if steps and low else ())
