"""Attention of windows to one another: stale keys and values of the bands around them.

    step t       window n attends to its own tokens, and to bands of its neighbours from step t - 1
    after it     bands of own windows are sent to the ranks that have their neighbours, for step t + 1

This is the exchange of displaced patches (DistriFusion, arXiv:2402.19481) between windows of native size. With it
windows need little overlap. It is for UNets, whose self-attention has no positional encoding, so that keys of another
window can be used unchanged. In the first step with windows there is no context.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport import TensorSpec, Work
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.step_clock import StepClock
from patchpar.shard.hooks import HookSet
from patchpar.shard.sdpa import AttentionCall, SdpaMode
from patchpar.strategies.structure.all_gather import UnitAssignment
from patchpar.strategies.structure.sizing import stride_of
from patchpar.strategies.structure.windows import WindowNeighbours, Windows
from patchpar.strategies.structure.work_schedule import Evaluation, Unit

KIND = "context"
BLOCKS = ("down_blocks", "mid_block", "up_blocks")


class KVPair(NamedTuple):
    """Keys and values, [B, heads, tokens, depth] each."""

    key: Tensor
    value: Tensor


class NeighbourLink(NamedTuple):
    """From a window to a neighbour, in one branch of guidance."""

    sender: int
    receiver: int
    branch: int


Bands = dict[tuple[NeighbourLink, str], KVPair]  # by link and layer


@dataclass(slots=True)
class _WindowCall:
    """One call of the denoiser in a step: the context of its windows, and the pending exchange for the next step."""

    evaluation: int = -2
    layout: tuple[Windows, UnitAssignment] | None = None
    seen: Bands = field(default_factory=dict)
    pending: Callable[[], Bands] | None = None

    def arrive(self) -> None:
        """Wait for the pending exchange. Raises ExchangeError."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.seen.update(pending())


class WindowContext:
    """Bands around windows, on one rank. `fraction`: the width of a band as a fraction of a window's side; 0 is none.

    Raises PlanError for a denoiser that is no UNet with self-attention.
    """

    def __init__(self, denoiser: nn.Module, mesh: AxisComm, clock: StepClock, fraction: float) -> None:
        self._mesh, self._clock, self._fraction = mesh, clock, fraction
        self._layers = _self_attentions(denoiser) if fraction else {}
        if fraction and not self._layers:
            raise PlanError(
                f"context={fraction:g}: {type(denoiser).__name__} is no UNet with self-attention, whose keys have no "
                "positional encoding: use context=0"
            )
        self._calls: dict[int, _WindowCall] = {}
        self.reset()

    def reset(self) -> None:
        """Begin or end an image: wait for pending exchanges. Raises ExchangeError."""
        for call in self._calls.values():
            call.arrive()
        self._calls, self._call = {}, _WindowCall()
        self._neighbours: WindowNeighbours | None = None
        self._links: list[NeighbourLink] = []
        self._tokens: dict[tuple[int, int, int], Tensor] = {}
        self._forms: dict[str, KVPair] = {}  # of a whole window, one branch
        self._left: Bands = {}

    def discard(self) -> None:
        """End an image whose ranks may be gone: pending exchanges are not waited for."""
        self._calls.clear()
        self.reset()

    def begin(self, windows: Windows, assignment: UnitAssignment) -> None:
        """Call before the windows of a step. Context of other windows, or older than one step, is dropped."""
        if not self._layers:
            return
        call = self._call = self._calls.setdefault(max(0, self._clock.call), _WindowCall())
        call.arrive()
        if call.evaluation != self._clock.evaluation - 1 or call.layout != (windows, assignment):
            call.seen = {}
        call.evaluation, call.layout, self._left = self._clock.evaluation, (windows, assignment), {}
        if self._neighbours is None or self._neighbours.windows != windows:
            down, across = (int(side * self._fraction) for side in windows.window)
            self._neighbours, self._tokens = WindowNeighbours(windows, (down, across)), {}
            pairs = permutations(range(len(windows)), 2)
            self._links = [NeighbourLink(*pair, 0) for pair in pairs if len(self._neighbours.seen(*pair, 1))]

    @contextmanager
    def around(self, evaluation: Evaluation) -> Iterator[None]:
        """Enter for a call of the denoiser: a window attends to its context, the anchor to itself only.

        Raises UnsupportedModel for a network whose attention cannot be extended.
        """
        count = len(self._neighbours.windows) if self._neighbours is not None else 0
        if not self._layers or evaluation.patch >= count:
            yield
            return
        with _ContextAttention(self, evaluation) as mode, HookSet() as hooks:
            for path, layer in self._layers.items():
                mode.track(hooks, path, layer)
            yield
        unused = [path for path in self._layers if path not in mode.passed]
        if unused:
            raise UnsupportedModel(
                f"{unused[0]} does not call scaled_dot_product_attention, so that it cannot attend to other windows: "
                "use the default processor, pipe.unet.set_default_attn_processor(), or context=0"
            )

    def with_neighbours(self, path: str, evaluation: Evaluation, own: KVPair) -> KVPair:
        """Return keys and values of all branches of the evaluation, with those of the context; keep ours to send.

        Raises UnsupportedModel.
        """
        number, branches = evaluation.patch, evaluation.branches
        self._forms[path] = KVPair(*(x.chunk(len(branches))[0] for x in own))
        for link in self._links:
            if link.sender == number:
                tokens = self._seen(link, path)
                keys, values = (x.index_select(2, tokens).chunk(len(branches)) for x in own)
                for branch, pair in zip(branches, zip(keys, values, strict=True), strict=True):
                    self._left[link._replace(branch=branch), path] = KVPair(*pair)
        parts = [own]
        for link in self._links:
            pairs = [self._call.seen.get((link._replace(branch=branch), path)) for branch in branches]
            found = [pair for pair in pairs if pair is not None]
            if link.receiver == number and len(found) == len(branches):
                parts.append(KVPair(*map(torch.cat, zip(*found, strict=True))))
        return KVPair(*(torch.cat(each, 2) for each in zip(*parts, strict=True))) if len(parts) > 1 else own

    def _seen(self, link: NeighbourLink, path: str) -> Tensor:
        """Return the indices of the sender's tokens that the receiver attends to in a layer."""
        assert self._neighbours is not None
        key = self._forms[path].key
        stride = _stride(key.shape[2], self._neighbours)
        index = (link.sender, link.receiver, stride)
        if index not in self._tokens:
            self._tokens[index] = self._neighbours.seen(*index).to(key.device)
        return self._tokens[index]

    def end(self, assignment: UnitAssignment, *, silent: bool) -> None:
        """Call after the windows of a step: send bands to the ranks that have the neighbours of our windows.

        Raises UnsupportedModel.
        """
        if not self._layers:
            return
        rank, size = self._mesh[1].rank, self._mesh[1].size
        self._call.seen = {key: self._left[key] for key in self._keys(assignment, rank, rank)}
        if size > 1 and not silent:
            self._call.pending = self._sent(assignment)
        self._left = {}

    def _keys(self, assignment: UnitAssignment, sender: int, receiver: int) -> list[tuple[NeighbourLink, str]]:
        """Return the bands that one rank has for another, in order."""
        wanted = set(assignment[receiver])
        return [
            (link._replace(branch=unit.branch), path)
            for unit in assignment[sender]
            for link in self._links
            if link.sender == unit.patch and Unit(link.receiver, unit.branch) in wanted
            for path in self._layers
        ]

    def _sent(self, assignment: UnitAssignment) -> Callable[[], Bands] | None:
        comm, axis = self._mesh
        outgoing, incoming = [], {}
        for group_rank in axis.others:
            leaving = [x.flatten() for key in self._keys(assignment, axis.rank, group_rank) for x in self._left[key]]
            if leaving:
                outgoing.append(((axis.ranks[group_rank],), (torch.cat(leaving),)))
            shapes = [shape for key in self._keys(assignment, group_rank, axis.rank) for shape in self._shapes(key)]
            if shapes:
                dtype = next(iter(self._forms.values())).key.dtype
                incoming[axis.ranks[group_rank]] = (TensorSpec((sum(map(math.prod, shapes)),), dtype),)
        if not outgoing and not incoming:
            return None
        exchange = comm.exchange(f"step {self._clock.evaluation}", [ExchangePart(KIND, outgoing, incoming)])
        return lambda: self._unpacked(exchange, assignment)

    def _shapes(self, key: tuple[NeighbourLink, str]) -> list[tuple[int, ...]]:
        link, path = key
        count = len(self._seen(link, path))
        return [(*x.shape[:2], count, x.shape[3]) for x in self._forms[path]]

    def _unpacked(self, exchange: Work[list[Received]], assignment: UnitAssignment) -> Bands:
        axis, found = self._mesh[1], {}
        (received,) = exchange.wait()
        for peer, (flat,) in received.items():
            keys = self._keys(assignment, axis.ranks.index(peer), axis.rank)
            shapes = [shape for key in keys for shape in self._shapes(key)]
            parts = iter(zip(torch.split(flat, [math.prod(shape) for shape in shapes]), shapes, strict=True))
            for key in keys:
                found[key] = KVPair(*(x.view(shape) for x, shape in (next(parts), next(parts))))
        return found


class _ContextAttention(SdpaMode):
    """Adds the context of a window to self-attention in one evaluation."""

    def __init__(self, context: WindowContext, evaluation: Evaluation) -> None:
        super().__init__(self._with_context)
        self._window_context, self._evaluation = context, evaluation
        self._path: str | None = None
        self.passed: set[str] = set()

    def track(self, hooks: HookSet, path: str, layer: nn.Module) -> None:
        """Track when this layer runs."""
        hooks.before(layer, partial(self._turn_to, path))
        hooks.after(layer, partial(self._turn_to, None))

    def _turn_to(self, path: str | None, *_: Any) -> None:
        self._path = path

    def _with_context(self, call: AttentionCall) -> Tensor:
        path = self._path
        if path is None or call.attn_mask is not None or call.key.shape[2] != call.query.shape[2]:
            return call.run()
        self.passed.add(path)
        joined = self._window_context.with_neighbours(path, self._evaluation, KVPair(call.key, call.value))
        return call._replace(key=joined.key, value=joined.value).run()


def _self_attentions(denoiser: nn.Module) -> dict[str, nn.Module]:
    return {
        path: module for path, module in denoiser.named_modules() if path.startswith(BLOCKS) and path.endswith(".attn1")
    }


def _stride(count: int, neighbours: WindowNeighbours) -> int:
    """Return the latents per token along a side, for `count` tokens of a window. Raises UnsupportedModel."""
    stride = stride_of(neighbours.windows.window, count)
    if stride is None:
        raise UnsupportedModel(f"{count} tokens are no map of a window of {neighbours.windows.window}: use context=0")
    return stride
