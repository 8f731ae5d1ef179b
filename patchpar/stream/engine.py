"""What one rank of a stream does: loads what its stage needs, and runs its stage for as long as a stream lasts."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.exchange import Door
from patchpar.launch.context import Bystander, ListeningContext
from patchpar.stream.audio import CONFIG as AUDIO_FILE
from patchpar.stream.audio import AudioConditioner
from patchpar.stream.causal_wan import CausalWan
from patchpar.stream.config import StreamConfig
from patchpar.stream.decoder import WanDecoder, from_pixels
from patchpar.stream.events import Change, Prompt, Reference
from patchpar.stream.link import Sign
from patchpar.stream.plan import StreamPlan
from patchpar.stream.stage import Finished, Order, StageFigures, StageLoop, Surroundings
from patchpar.stream.talk import Begin, Cancel, Course, Facts, Produced, Ready, Said, Shown, Stop, Wish
from patchpar.stream.wan import WanStream, WanStreamOptions
from patchpar.transport import Transport, connect

THROUGH = "shared_memory"
"""Not NCCL, which keeps the order of all messages of a rank: one that is expected early would hold up those we send."""
REST_SECONDS = 5.0
"""How often a first rank that waits for orders shows that it is there."""


class StreamEngine:
    """One rank."""

    def __init__(self, context: ListeningContext) -> None:
        self._context = context
        self._device = torch.device(context.device)
        self._transport: Transport | None = None
        self._pipe: Any = None
        self._network: CausalWan | None = None
        self._decoder: WanDecoder | None = None
        self._cancelled = False
        self._course: Course | None = None

    def load(self, folder: str, config: StreamConfig, plan: StreamPlan, options: Mapping[str, Any]) -> Facts | None:
        """Load from a WanPipeline folder what this rank's stage needs. Raises UnsupportedModel, PlanError."""
        self._config, self._plan = config, plan
        rank = self._context.rank
        if self._context.world_size > 1 and self._transport is None:
            self._transport = connect(self._device, deadline=self._context.deadline, through=THROUGH)
        if rank >= plan.ranks:
            return None
        if self._context.world_size > 1:  # one bar per rank and component would only be noise
            diffusers.utils.logging.disable_progress_bar()
            transformers.utils.logging.disable_progress_bar()
        stage = plan.stages[plan.stage_of(rank)]
        spared: dict[str, Any] = {} if rank == 0 else {"tokenizer": None, "text_encoder": None}
        if rank and not stage.decodes:
            spared["vae"] = None
        if not stage.steps:
            spared["transformer"] = _hollow_transformer(folder, options)
        self._pipe = WanPipeline.from_pretrained(folder, use_safetensors=True, **spared, **options)
        _refuse(self._pipe)
        for network in (self._pipe.vae, self._pipe.text_encoder, self._pipe.transformer if stage.steps else None):
            if network is not None:
                network.to(self._device)
        self._network = CausalWan(self._pipe.transformer.eval(), config.blocks, self._ears(Path(folder)))
        self._decoder = None if self._pipe.vae is None else WanDecoder(self._pipe.vae)
        return self._facts() if rank == 0 else None

    def _ears(self, folder: Path) -> AudioConditioner | None:
        if not (folder / "transformer" / AUDIO_FILE).is_file():
            return None
        return AudioConditioner.load(folder / "transformer").to(self._device, self._pipe.transformer.dtype)

    def _facts(self) -> Facts:
        audio = None if self._network is None or self._network.audio is None else self._network.audio.config
        vae = self._pipe.vae.config
        return Facts(
            audio=audio,
            per_latent=int(vae.scale_factor_temporal),
            spatial=int(vae.scale_factor_spatial),
            speaks=self._pipe.text_encoder is not None,
        )

    def run(self, course: Course) -> StageFigures | Bystander:
        """This rank's part of one stream, to its end. Raises ExchangeError if another rank is late or gone."""
        if self._context.rank >= self._plan.ranks:
            return Bystander()
        self._cancelled, self._course, self._announced = False, course, -1
        door = None
        if self._transport is not None:
            self._transport.deadline = self._context.deadline
            door = Door(self._transport, self._context.mark)
        around = Surroundings(order=self._order, put=self._put, is_cancelled=self._is_cancelled)
        loop = StageLoop(self._model(course), self._plan, self._context.rank, door, around, course.first_block)
        return loop.run()

    def _model(self, course: Course) -> WanStream:
        assert self._network is not None
        options = WanStreamOptions(
            height=course.rows,
            width=course.columns,
            seed=course.seed,
            text=torch.zeros(1, self._config.text_tokens, self._network.transformer.config.text_dim),
            adapt_sink=course.adapt_sink,
        )
        return WanStream(self._network, self._config.schedule, self._decoder, options)

    def _order(self, block: int, patience: float) -> Order:
        """Ask the session, on the first rank."""
        if self._announced != block:
            self._context.emit(Ready(block=block))
            self._announced = block
        self._context.mark("stream")
        heard = self._context.hear(min(patience, REST_SECONDS))
        if isinstance(heard, Cancel):
            self._cancelled = True
        if isinstance(heard, (Stop, Cancel)):
            return Order(sign=Sign.END)
        if not isinstance(heard, Begin):
            return Order(sign=Sign.REST)
        inputs = tuple(x.to(self._device) for x in heard.inputs)
        return Order(sign=Sign.BLOCK, inputs=inputs, changes=tuple(map(self._resolved, heard.wishes)))

    @torch.no_grad()
    def _resolved(self, wish: Wish) -> Change:
        """Text and pictures as what the stages take."""
        if isinstance(wish, Said):
            text, _ = self._pipe.encode_prompt(
                wish.text,
                do_classifier_free_guidance=False,
                max_sequence_length=self._config.text_tokens,
                device=self._device,
            )
            return Prompt(text=text, transition=wish.transition, over=wish.over)
        if isinstance(wish, Shown):
            assert self._decoder is not None
            return Reference(latents=self._decoder.encode(from_pixels(wish.picture).to(self._device)))
        return wish

    def _is_cancelled(self) -> bool:
        if not self._cancelled and self._context.rank > 0:
            self._cancelled = isinstance(self._context.hear(0.0), Cancel)
        return self._cancelled

    def _put(self, finished: Finished) -> None:
        course = self._course
        assert course is not None
        is_first = finished.block == course.first_block and course.adapt_sink
        sink: Tensor | None = finished.latents[0][:, :, :1].cpu() if is_first else None
        seconds = (time.time_ns() - finished.born) / 1e9
        self._context.emit(Produced(block=finished.block, frames=finished.frames, seconds=seconds, sink=sink))


def _hollow_transformer(folder: str, options: Mapping[str, Any]) -> WanTransformer3DModel:
    """Shapes without weights, for a rank that decodes only."""
    config = WanTransformer3DModel.load_config(folder, subfolder="transformer")
    with torch.device("meta"):
        return WanTransformer3DModel.from_config(config).to(options.get("torch_dtype", torch.float32))


def _refuse(pipe: Any) -> None:
    if getattr(pipe, "transformer_2", None) is not None or pipe.config.get("expand_timesteps"):
        raise UnsupportedModel("a stream needs one transformer with one noise level per block: this pipeline has more")
    if pipe.transformer is None:
        raise PlanError("the folder has no transformer")
    if pipe.vae is not None and not isinstance(pipe.vae, AutoencoderKLWan):
        raise UnsupportedModel(f"a {type(pipe.vae).__name__} cannot decode block by block: AutoencoderKLWan can")
