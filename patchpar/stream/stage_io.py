"""A rank's messages to and from a session: it receives orders and cancellation, and sends finished blocks."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from patchpar.launch.executor import InteractiveRankContext
from patchpar.stream.events import Change
from patchpar.stream.messages import BeginBlock, BlockReady, CancelStream, EndStream, ProducedBlock, StreamRun, Update
from patchpar.stream.stage import FinishedBlock, StageIO, StageOrder
from patchpar.stream.stage_link import BlockSignal

REST_SECONDS = 5.0
"""Seconds between heartbeats of a first rank that waits for orders."""


class RankStageIO:
    """The StageIO of one stream on this rank. `resolve`: encodes text and images of an update."""

    def __init__(self, context: InteractiveRankContext, run: StreamRun, resolve: Callable[[Update], Change]) -> None:
        self._context, self._run, self._resolve = context, run, resolve
        self._device = torch.device(context.device)
        self._cancelled, self._asked = False, False
        self._announced = -1

    def as_stage_io(self) -> StageIO:
        """Return the callbacks for the stage."""
        return StageIO(order=self._order, put=self._put, is_cancelled=self._is_cancelled)

    def _order(self, block: int, patience: float) -> StageOrder:
        """Announce block `block` on the first rank and wait for the session's order."""
        if self._announced != block:
            self._context.emit(BlockReady(block=block))
            self._announced = block
        self._context.beat("stream")
        heard = self._context.hear(min(patience, REST_SECONDS, self._context.deadline / 4))
        self._asked = heard is None
        if isinstance(heard, CancelStream):
            self._cancelled = True
        if isinstance(heard, (EndStream, CancelStream)):
            return StageOrder(sign=BlockSignal.END)
        if not isinstance(heard, BeginBlock):
            return StageOrder(sign=BlockSignal.REST)
        inputs = tuple(x.to(self._device) for x in heard.inputs)
        return StageOrder(sign=BlockSignal.BLOCK, inputs=inputs, changes=tuple(map(self._resolve, heard.updates)))

    def _is_cancelled(self) -> bool:
        """Between two orders a session sends nothing but CancelStream; an order is left for the next `_order`."""
        if not self._cancelled and not self._asked:
            self._cancelled = isinstance(self._context.hear(0.0), CancelStream)
        return self._cancelled

    def _put(self, finished: FinishedBlock) -> None:
        is_first = finished.block == self._run.first_block and self._run.adapt_sink
        sink: Tensor | None = finished.latents[0][:, :, :1].cpu() if is_first else None
        seconds = (time.time_ns() - finished.born) / 1e9
        self._context.emit(ProducedBlock(block=finished.block, frames=finished.frames, seconds=seconds, sink=sink))
