"""Stale keys in one process: every rank is a replica in the batch, and attention is given the keys it would have.

Each replica computes all tokens, but of its keys only those of its own share (and the text) are of this step; the
others are what the replica of that share had in the last one. Its prediction counts for its own tokens only. The other
way round than the package does it, which computes a share of the tokens and holds buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from patchpar.clock import StepClock
from patchpar.exchange import Door
from patchpar.mesh import Axis
from patchpar.strategies import parse_strategy
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.threads import on_threads

from .ranks import predictions

TIMES = (0.9, 0.8, 0.6, 0.55, 0.3)
"""Of the evaluations: some steps are longer than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Evaluations of a tiny transformer. `seen`: the share of a neighbour's tokens; None: all of everybody's."""

    name: str
    strategy: str
    ranks: int = 2
    evaluations: int = 4
    exchange: str = "on"
    seen: float | None = None
    leads_on: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}-{self.strategy}"

    @property
    def start(self) -> int | None:
        """Where the tokens of a joint sequence begin; None: after the text."""
        return 0 if self.name.startswith(("SD3", "PixArt")) else None

    def build(self) -> nn.Module:
        """The transformer, with weights that are the same every time."""
        return TRANSFORMERS[self.name].build()

    def call(self, evaluation: int) -> dict[str, Any]:
        """Other latents at another time in every evaluation, the same text."""
        tiny = TRANSFORMERS[self.name]
        call = dict(tiny.call(0))
        latent = call[tiny.tokens]
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(evaluation))
        time = torch.full_like(call["timestep"], TIMES[evaluation] * (1 if call["timestep"].max() <= 1 else 1000))
        return call | {tiny.tokens: latent + 0.3 * evaluation * noise, "timestep": time}

    @property
    def tokens(self) -> int:
        """How many there are."""
        latent = self.call(0)[TRANSFORMERS[self.name].tokens]
        return latent.shape[1] if latent.ndim == 3 else latent.shape[-2] * latent.shape[-1] // 4

    @property
    def shares(self) -> list[slice]:
        """The tokens of each rank."""
        sizes = [self.tokens // self.ranks + (place < self.tokens % self.ranks) for place in range(self.ranks)]
        ends = list(accumulate(sizes))
        return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@torch.no_grad()
def on_ranks(case: Case) -> list[list[Tensor]]:
    """Every evaluation's prediction, as each rank has it."""
    models = [case.build() for _ in range(case.ranks)]  # threads share torch's random state

    def on_rank(transport: Any) -> list[Tensor]:
        axis = Axis("patch", transport.rank, case.ranks, tuple(range(case.ranks)))
        clock, model = StepClock(), models[transport.rank]
        split = parse_strategy(case.strategy).install(model, Door(transport), axis, clock=clock)
        split.exchange = case.exchange
        clock.reset()
        split.reset()
        found = []
        with torch.no_grad():
            for evaluation in range(case.evaluations):
                clock.next_call()
                found.append(predictions(split.denoise(model.forward, **case.call(evaluation)))[0])
                clock.tick()
        split.finish()
        split.restore()
        return found

    found = on_threads(case.ranks, on_rank, deadline=60.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@torch.no_grad()
def plain(case: Case) -> list[Tensor]:
    """The same in one piece."""
    model = case.build()
    return [predictions(model(**case.call(evaluation)))[0] for evaluation in range(case.evaluations)]


@torch.no_grad()
def replicas(case: Case) -> list[Tensor]:
    """The same with stale keys, in one process; the first evaluation is exact."""
    model, mode = case.build(), _Replicas(case)
    found = []
    for evaluation in range(case.evaluations):
        call = case.call(evaluation)
        batch = call["timestep"].shape[0]
        many = tree_map_only(Tensor, lambda x, b=batch: _repeated(x, b, case.ranks), call)
        mode.begin(evaluation)
        with mode:
            whole = predictions(model(**many))[0]
        found.append(_joined(case, whole))
    return found


def _repeated(x: Tensor, batch: int, ranks: int) -> Tensor:
    return x.repeat(ranks, *[1] * (x.ndim - 1)) if x.ndim and x.shape[0] == batch else x


def _joined(case: Case, whole: Tensor) -> Tensor:
    """Of each replica's prediction its own tokens."""
    each = whole.chunk(case.ranks)
    if whole.ndim == 3:
        return torch.cat([x[:, share] for x, share in zip(each, case.shares, strict=True)], dim=1)
    result, (rows, columns) = torch.empty_like(each[0]), (whole.shape[-2] // 2, whole.shape[-1] // 2)
    for x, share in zip(each, case.shares, strict=True):
        owned = torch.zeros(rows * columns, dtype=torch.bool)
        owned[share] = True
        owned = owned.view(rows, columns).repeat_interleave(2, 0).repeat_interleave(2, 1)
        result[..., owned] = x[..., owned]
    return result


@dataclass(slots=True)
class _Keys:
    """Keys and values of one attention call, [R, B, N, L, D] each, the newest last."""

    newest: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class _Replicas(TorchFunctionMode):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.evaluation, self.number = case, 0, 0
        self.kept: dict[int, _Keys] = {}

    def begin(self, evaluation: int) -> None:
        self.evaluation, self.number = evaluation, 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if key.shape[-2] != query.shape[-2] or key.shape[-2] < self.case.tokens:  # what everybody has
            return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
        kept, self.number = self.kept.setdefault(self.number, _Keys()), self.number + 1
        now = tuple(x.unflatten(0, (self.case.ranks, -1)) for x in (key, value))
        seen = tuple(self._of_shares(kept, x, index).flatten(0, 1) for index, x in enumerate(now))
        kept.newest = [*kept.newest[-1:], tuple(x.clone() for x in now)]
        mask = self._hidden(key.shape[-2], attn_mask, query)
        return F.scaled_dot_product_attention(query, *seen, attn_mask=mask, **options)

    def _places(self, length: int) -> Iterator[tuple[int, slice]]:
        start = length - self.case.tokens if self.case.start is None else self.case.start
        for place, share in enumerate(self.case.shares):
            yield place, slice(start + share.start, start + share.stop)

    def _of_shares(self, kept: _Keys, now: Tensor, index: int) -> Tensor:
        """What each replica attends to."""
        seen = now.clone()
        if self.evaluation == 0:
            return seen
        last = kept.newest[-1][index]
        if self.case.leads_on and len(kept.newest) == 2:
            times = TIMES[self.evaluation - 2 : self.evaluation + 1]
            ahead = (times[2] - times[1]) / (times[1] - times[0])
            before = kept.newest[0][index]
            last = last + min(2.0, ahead) * (last - before)
        for sender, place in self._places(now.shape[-2]):
            for receiver in range(self.case.ranks):
                if receiver != sender:
                    seen[receiver, ..., place, :] = last[sender, ..., place, :]
        return seen

    def _hidden(self, length: int, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """The mask, and what a replica does not see at all."""
        if self.case.seen is None or self.evaluation == 0:
            return mask
        visible = torch.zeros(self.case.ranks, length, dtype=torch.bool)
        places = dict(self._places(length))
        inside = torch.zeros(length, dtype=torch.bool)
        for place in places.values():
            inside[place] = True
        visible[:, ~inside] = True
        for receiver, own in places.items():
            visible[receiver, own] = True
            for sender, place in places.items():
                if abs(sender - receiver) == 1:
                    count = max(1, round(self.case.seen * (place.stop - place.start)))
                    near = (
                        slice(place.stop - count, place.stop)
                        if sender < receiver
                        else slice(place.start, place.start + count)
                    )
                    visible[receiver, near] = True
        each = visible.repeat_interleave(query.shape[0] // self.case.ranks, 0)[:, None, None]
        assert mask is None, "not needed so far"
        return each
