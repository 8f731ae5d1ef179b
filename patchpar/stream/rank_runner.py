"""Base classes of the runners of all streams: a rank's device, its transport, and its part of a plan."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.device_links import DeviceLinks, drop_links, form_links
from patchpar.comm.transport import connect, extend, watched
from patchpar.launch.executor import IdleRank, InteractiveRankContext
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.models.streaming.model_facts import ModelFacts
from patchpar.plan.stream_plan import StageSteps, StreamPlan
from patchpar.shard.host_memory import to_device, to_host
from patchpar.stream.events import Change, Prompt
from patchpar.stream.messages import (
    BeginBlock,
    BlockReady,
    CancelStream,
    EndStream,
    ProducedBlock,
    PromptUpdate,
    StreamRun,
    Update,
)
from patchpar.stream.stage import FinishedBlock, Order, StageIO, StageStats

REST_SECONDS = 1.0
"""Seconds between messages of a first rank that waits for orders; it then notices that another rank has died."""
THROUGH = "device"
"""Ranks are workers of one host. Not one group of NCCL for all of them, which orders all messages of a rank."""


class RankRunner:
    """One rank of a stream."""

    def __init__(self, context: InteractiveRankContext) -> None:
        self._context = context
        self._device = torch.device(context.device)
        self._pipe: Any = None
        if context.world_size > 1:  # before a model arrives: unpickling it imports libraries that log
            silence_libraries()


class StageRunner(RankRunner, ABC):
    """One rank of a video stream: loads the parts that its stage needs, and runs its stage until the stream ends."""

    _comm: Communicator | None = None
    _plan: StreamPlan

    def load(
        self, folder: str, config: Any, plan: StreamPlan, options: Mapping[str, Any]
    ) -> ModelFacts | IdleRank | None:
        """Load the parts that this rank's stage needs from a pipeline's folder. Only rank 0 returns facts.

        Nothing is exchanged, so that a rank that has been started anew can do it alone.
        `config`: StreamConfig or FifoConfig. `options`: of diffusers' from_pretrained. Raises UnsupportedModel,
        PlanError.
        """
        self._config, self._plan = config, plan
        context, rank = self._context, self._context.rank
        if context.world_size > 1 and self._comm is None:
            self._comm = Communicator(connect(context, through=THROUGH, ranks=()), context.beat, context.seal)
        if rank >= plan.ranks:
            return IdleRank()
        facts = self._load_stage(Path(folder), plan.stages[plan.stage_of(rank)], options)
        return facts if rank == 0 else None

    def run(self, run: StreamRun) -> StageStats | IdleRank:
        """Run this rank's stage until the stream ends. Raises ExchangeError if another rank is late or has died."""
        if self._context.rank >= self._plan.ranks:
            return IdleRank()
        if self._comm is None:
            return self._run_stage(run)
        ranks = range(self._plan.ranks)
        extend(watched(self._comm.transport, self._context), self._context, ranks)  # those not, or no longer, connected
        form_links(self._comm, ranks, self._links())
        try:
            return self._run_stage(run)
        except BaseException as error:
            drop_links(self._comm, f"rank {self._context.rank} has left the stream: {error}")
            raise

    def _stage_io(self, run: StreamRun) -> StageIO:
        """Return the callbacks of this rank's stage in a run."""
        self._running, self._cancelled, self._asked, self._announced = run, False, False, -1
        return StageIO(order=self._order, put=self._put, is_cancelled=self._is_cancelled, lost=self._context.emit)

    def _order(self, block: int, patience: float) -> Order:
        """Announce block `block` on the first rank and wait for the session's order."""
        if self._announced != block:
            self._context.emit(BlockReady(block=block))
            self._announced = block
        self._context.beat("stream")
        message = self._context.receive(min(patience, REST_SECONDS, self._context.deadline / 4))
        self._asked = message is None
        self._cancelled |= isinstance(message, CancelStream)
        if isinstance(message, (EndStream, CancelStream)):
            return EndStream()
        if not isinstance(message, BeginBlock):
            return None
        inputs = tuple(to_device(x, self._device) for x in message.inputs)
        return replace(message, inputs=inputs, updates=tuple(map(self._resolve, message.updates)))

    def _is_cancelled(self) -> bool:
        """Between two orders a session sends nothing but CancelStream; an order is left for the next `_order`."""
        if not self._cancelled and not self._asked:
            self._cancelled = isinstance(self._context.receive(0.0), CancelStream)
        return self._cancelled

    def _put(self, finished: FinishedBlock) -> None:
        is_first = finished.block == self._running.first_block and self._running.adapt_sink
        sink: Tensor | None = to_host(finished.latents[0][:, :, :1]) if is_first else None
        seconds = (time.time_ns() - finished.born) / 1e9
        self._context.emit(
            ProducedBlock(block=finished.block, frames=finished.frames, seconds=seconds, sink=sink, lost=finished.lost)
        )

    def _links(self) -> DeviceLinks:
        """Between which ranks tensors go from device to device."""
        plan = self._plan
        sets = tuple(tuple(stage.ranks) for stage in plan.stages if len(stage.ranks) > 1)
        return DeviceLinks(pairs=plan.links, sets=sets)

    def _to_device(self, *networks: Any) -> None:
        for network in networks:
            if network is not None:
                network.to(self._device)

    @abstractmethod
    def _load_stage(self, folder: Path, stage: StageSteps, options: Mapping[str, Any]) -> ModelFacts | None:
        """Load the parts that a stage needs."""

    @abstractmethod
    def _run_stage(self, run: StreamRun) -> StageStats:
        """Run the stage until the stream ends."""

    @torch.no_grad()
    def _encoded(self, update: PromptUpdate, negative: str | None = None) -> Prompt:
        """Encode a prompt, and with guidance the negative prompt."""
        limits = {"max_sequence_length": self._config.text_tokens, "device": self._device}
        text, negative_text = encoded_prompts(self._pipe, update.text, negative, **limits)
        return Prompt(text=text, transition=update.transition, over=update.over, negative=negative_text)

    @abstractmethod
    def _resolve(self, update: Update) -> Change:
        """Encode text and images of an update."""


def encoded_prompts(pipe: Any, text: str, negative: str | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return embeddings [1, T, D] of the prompt and of the negative prompt, None without guidance.

    `options`: of the pipeline's own `encode_prompt`. Padding that LTX-Video masks is cut off: T differs between texts.
    """
    guided = negative is not None
    found = pipe.encode_prompt(text, negative_prompt=negative, do_classifier_free_guidance=guided, **options)
    if len(found) == 2:
        text_BTD, negative_BTD = found
        return text_BTD, negative_BTD
    text_BTD, mask_BT, negative_BTD, negative_mask_BT = found
    return text_BTD[:, mask_BT[0].bool()], negative_BTD[:, negative_mask_BT[0].bool()] if guided else None
