"""Runner of a FIFO stream on one rank: loads the parts that its zones need, and denoises them until the stream ends."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchpar.comm.device_links import DeviceLinks
from patchpar.models.streaming.checkpoint import RequiredWeights
from patchpar.models.streaming.fifo.network import FrameNetwork, LtxFrames, WanFrames
from patchpar.models.streaming.model_facts import ModelFacts
from patchpar.models.streaming.video_folder import HIGH_NOISE, LTX, transformer_class
from patchpar.plan.stream_plan import StageSteps
from patchpar.stream.events import Change
from patchpar.stream.fifo.stage import FifoModel, FifoStage
from patchpar.stream.messages import PromptUpdate, StreamRun, Update
from patchpar.stream.rank_runner import StageRunner
from patchpar.stream.stage import StageStats


class FifoRunner(StageRunner):
    """Denoises and decodes on one rank."""

    def _load_stage(self, folder: Path, stage: StageSteps, options: Mapping[str, Any]) -> ModelFacts | None:
        family: type[FrameNetwork] = LtxFrames if transformer_class(folder) == LTX else WanFrames
        denoises, rank = bool(stage.steps), self._context.rank
        parts = (HIGH_NOISE,) if denoises else ()
        needs = RequiredWeights(text=rank == 0, vae=rank == self._plan.decoder, transformers=parts)
        self._pipe = pipe = family.load(folder, needs, options)
        facts = family.facts(folder)
        scale = facts.per_latent / self._config.fps, float(facts.spatial), float(facts.spatial)
        self._network = family(pipe.transformer, scale)
        self._decoder = None if pipe.vae is None else family.decoder(pipe.vae)
        self._to_device(pipe.vae, pipe.text_encoder, pipe.transformer if denoises else None)
        return facts

    def _links(self) -> DeviceLinks:
        links = super()._links()  # frames go back to the noisier rank too
        return replace(links, pairs=(*links.pairs, *((receiver, sender) for sender, receiver in links.pairs)))

    def _run_stage(self, run: StreamRun) -> StageStats:
        model = FifoModel(self._network, self._decoder, self._config.queue, run)
        return FifoStage(model, self._plan, self._context.rank, self._comm, self._stage_io(run)).run()

    def _resolve(self, update: Update) -> Change:
        assert isinstance(update, PromptUpdate), "a FifoSession changes nothing else"
        return self._encoded(update, self._running.negative if self._running.guidance_scale > 1 else None)
