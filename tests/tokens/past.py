"""Stale keys in one process: every rank is a replica in the batch, and attention is given the keys it would have.

Each replica computes all tokens, but of its keys only those of its own share (and the text) are of this step; the
others are what the replica of that share had in the last one. Of a text that is split, each token is what the replica
has in whose share it is. Its prediction counts for its own tokens only. The other way round than the package does it,
which computes a share of the tokens and holds buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.emulation.sight import corrected_tokens
from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.strategies import parse_strategy
from tests.tiny.transformers import TRANSFORMERS
from tests.tiny.transformers_entry import IMAGE, VIDEO
from tests.unit.threads import on_threads

from .nobody import Nobody
from .ranks import predictions

TIMES = (0.9, 0.8, 0.6, 0.55, 0.3)
"""Of the evaluations: some steps are longer than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Evaluations of a tiny transformer, of the size of a `variant`.

    What a rank has is a number of `lines` of tokens: of rows or of frames, whichever are more; or else equally many
    tokens of every frame. `seen`: the share of a neighbour's lines; None: all of everybody's. `pool`:
    everything else is seen as averages over so many rows and columns.
    """

    name: str
    strategy: str
    ranks: int = 2
    evaluations: int = 4
    exchange: str = "on"
    seen: float | None = None
    pool: int | None = None
    leads_on: bool = False
    variant: int = 0
    mask: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{'x'.join(map(str, self.grid))}-{self.ranks}-{self.strategy}"

    @property
    def correction(self) -> str:
        """What ranks say of how their keys have changed."""
        strategy: Any = parse_strategy(self.strategy)
        return "none" if getattr(strategy, "context", "") == "partials" else getattr(strategy, "correction", "none")

    @property
    def splits_text(self) -> bool:
        """Whether each rank has a share of the text."""
        return bool(parse_strategy(self.strategy).policy.text == "split") and self.exchange == "on"

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
        call = dict(tiny.call(self.variant))
        latent = call[tiny.tokens]
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(evaluation))
        time = torch.full_like(call["timestep"], TIMES[evaluation] * (1 if call["timestep"].max() <= 1 else 1000))
        return call | {tiny.tokens: latent + 0.3 * evaluation * noise, "timestep": time} | self._masked(call)

    def _masked(self, call: dict[str, Any]) -> dict[str, Any]:
        """With `mask`: the last rows of the image are hidden from everybody."""
        if not self.mask:
            return {}
        hidden = torch.ones(2, 1, 1, call["encoder_hidden_states"].shape[1] + self.tokens, dtype=torch.bool)
        hidden[..., -2 * self.grid[2] - 3 :] = False
        return {"joint_attention_kwargs": {"attention_mask": hidden}}

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens."""
        return VIDEO[self.variant] if "3D" in self.name or "Video" in self.name else (1, *IMAGE[self.variant])

    @property
    def tokens(self) -> int:
        """How many there are."""
        return math.prod(self.grid)

    @property
    def numbers(self) -> Tensor:
        """The number of every token, by frame, row and column."""
        return torch.arange(self.tokens).view(self.grid)

    @property
    def blocks(self) -> list[Tensor]:
        """The tokens of each rank: by frame, row and column."""
        frames, rows, _ = self.grid
        if self.seen is None and self.pool is None:
            each = self.numbers.view(1, -1) if frames >= rows else self.numbers.flatten(1)
            return [part.unsqueeze(-1) for part in each.tensor_split(self.ranks, 1)]
        return list(self.numbers.tensor_split(self.ranks, self.dim))

    @property
    def dim(self) -> int:
        """Which of the three is shared between ranks."""
        return 0 if self.grid[0] >= self.grid[1] else 1

    @property
    def token_parts(self) -> list[Tensor]:
        """The numbers of the tokens of each rank."""
        return [block.flatten() for block in self.blocks]

    def sights(self, receiver: int, sender: int) -> list[Tensor]:
        """What a rank sees of another's tokens: the numbers of each token, or of those that it sees as one."""
        block = self.blocks[sender]
        near, far = block[:0], block
        if self.seen is not None:
            near, far = self._near_and_far(block, receiver, sender)
        elif self.pool is None:
            near, far = block, block[:0]
        sights = list(near.flatten().unsqueeze(-1))
        if self.pool is not None and far.numel():
            for plane in far:
                for band in plane.split(self.pool, 0):
                    sights += [window.flatten() for window in band.split(self.pool, 1)]
        return sights

    def _near_and_far(self, block: Tensor, receiver: int, sender: int) -> tuple[Tensor, Tensor]:
        assert self.seen is not None
        if abs(receiver - sender) > 1:
            return block[:0], block
        lines = block.shape[self.dim]
        count = max(1, round(self.seen * lines))
        if sender < receiver:
            far, near = block.split([lines - count, count], self.dim)
        else:
            near, far = block.split([count, lines - count], self.dim)
        return near, far


def on_ranks(case: Case) -> list[list[Tensor]]:
    """Every evaluation's prediction, as each rank has it."""
    found = on_threads(case.ranks, on_rank_of(case), deadline=60.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@torch.no_grad()
def on_rank_of(case: Case) -> Callable[[Any], list[Tensor]]:
    """What predicts all evaluations on the rank of a transport."""
    models = [case.build() for _ in range(case.ranks)]  # threads share torch's random state
    plan = _plan(case.name, case.variant, case.mask)

    @torch.no_grad()
    def on_rank(transport: Any) -> list[Tensor]:
        axis = Axis("patch", transport.rank, case.ranks, tuple(range(case.ranks)))
        clock, model = StepClock(), models[transport.rank]
        split = parse_strategy(case.strategy).install(model, Communicator(transport), axis, clock=clock)
        split.plan, split.exchange = plan, case.exchange
        clock.reset()
        split.reset()
        found = []
        for evaluation in range(case.evaluations):
            clock.next_call()
            found.append(predictions(split.denoise(model.forward, **case.call(evaluation)))[0])
            clock.tick()
        split.finish()
        split.restore()
        return found

    return on_rank


@torch.no_grad()
def flops_of_a_step(case: Case) -> int:
    """What the first rank computes in the last evaluation."""
    model, clock, axis = case.build(), StepClock(), Axis("patch", 0, case.ranks, tuple(range(case.ranks)))
    split = parse_strategy(case.strategy).install(model, Communicator(Nobody(0, "cpu")), axis, clock=clock)
    split.plan = _plan(case.name, case.variant, case.mask)
    counter = FlopCounterMode(display=False)
    for evaluation in range(case.evaluations):
        counter = FlopCounterMode(display=False)
        clock.next_call()
        with counter:
            split.denoise(model.forward, **case.call(evaluation))
        clock.tick()
    split.restore()
    return counter.get_total_flops()


@cache
def _plan(name: str, variant: int, mask: bool) -> TokenPlan:
    case = Case(name=name, strategy="exact", variant=variant, mask=mask)
    model = case.build()
    return discover_tokens(model, model.forward, (), case.call(0))


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
        result = torch.empty_like(each[0])
        for x, indices in zip(each, case.token_parts, strict=True):
            result[:, indices] = x[:, indices]
        return result
    result = torch.empty_like(each[0])
    for x, indices in zip(each, case.token_parts, strict=True):
        owned = torch.isin(case.numbers, indices).repeat_interleave(2, 1).repeat_interleave(2, 2)
        owned = owned if whole.ndim == 5 else owned.squeeze(0)
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
        now = tuple(self._with_text(x.unflatten(0, (self.case.ranks, -1))) for x in (key, value))
        last = None if self.evaluation == 0 else tuple(self._last(kept, index) for index in range(2))
        if last is not None and self.case.correction != "none":
            last = tuple(self._corrected(*each, key.shape[-2]) for each in zip(now, last, kept.newest[-1], strict=True))
        kept.newest = [*kept.newest[-1:], tuple(x.clone() for x in now)]
        if last is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
        bias = torch.zeros(1, 1, 1, key.shape[-2]) if attn_mask is None else _as_bias(attn_mask)
        each = query.unflatten(0, (self.case.ranks, -1))
        biases = bias.expand(query.shape[0], *bias.shape[1:]).unflatten(0, (self.case.ranks, -1))
        outputs = []
        for receiver in range(self.case.ranks):
            keys, values = (self._seen(x[receiver], y, receiver) for x, y in zip(now, last, strict=True))
            seen = self._bias(biases[receiver], receiver)
            outputs.append(F.scaled_dot_product_attention(each[receiver], keys, values, attn_mask=seen, **options))
        return torch.cat(outputs)

    def _with_text(self, x: Tensor) -> Tensor:
        """Keys or values in which each token of the text is its owner's."""
        length = x.shape[-2]
        start = self._start(length)
        text = torch.cat([torch.arange(start), torch.arange(start + self.case.tokens, length)])
        if not self.case.splits_text or len(text) < self.case.ranks:
            return x
        x = x.clone()
        for owner, indices in enumerate(text.tensor_split(self.case.ranks)):
            x[..., indices, :] = x[owner][..., indices, :].clone()
        return x

    def _last(self, kept: _Keys, index: int) -> Tensor:
        """What every replica had in the last step, or where that leads."""
        last = kept.newest[-1][index]
        if not (self.case.leads_on and len(kept.newest) == 2):
            return last
        times = TIMES[self.evaluation - 2 : self.evaluation + 1]
        ahead = (times[2] - times[1]) / (times[1] - times[0])
        before = kept.newest[0][index]
        return last + min(2.0, ahead) * (last - before)

    def _corrected(self, now: Tensor, last: Tensor, old: Tensor, length: int) -> Tensor:
        """What is held of every replica's own tokens, moved by what it says of them."""
        found = last.clone()
        for sender, indices in enumerate(self.case.token_parts):
            where = self._start(length) + indices
            own = (x[sender][..., where, :] for x in (now, last, old))
            found[sender][..., where, :] = corrected_tokens(self.case.correction, *own)
        return found

    def _here(self, receiver: int, length: int) -> Tensor:
        """Where a replica's own tokens and those that everybody has are."""
        start = self._start(length)
        here = torch.ones(length, dtype=torch.bool)
        here[start : start + self.case.tokens] = False
        here[start + self.case.token_parts[receiver]] = True
        return here.nonzero().flatten()

    def _start(self, length: int) -> int:
        return length - self.case.tokens if self.case.start is None else self.case.start

    def _sights(self, receiver: int, length: int) -> list[tuple[int, Tensor]]:
        """Of whom, and where, what a replica sees of others is."""
        senders = [sender for sender in range(self.case.ranks) if sender != receiver]
        start = self._start(length)
        return [(sender, start + where) for sender in senders for where in self.case.sights(receiver, sender)]

    def _seen(self, now: Tensor, last: Tensor, receiver: int) -> Tensor:
        """Keys or values that a replica attends to: its own, and others' tokens of the last step."""
        length = now.shape[-2]
        seen = [last[sender][..., where, :].mean(-2, keepdim=True) for sender, where in self._sights(receiver, length)]
        return torch.cat([now[..., self._here(receiver, length), :], *seen], -2)

    def _bias(self, bias: Tensor, receiver: int) -> Tensor:
        """For each of them: one that stands for several counts as many as are not hidden."""
        length = bias.shape[-1]
        summed = [bias[..., where].logsumexp(-1, keepdim=True) for _, where in self._sights(receiver, length)]
        return torch.cat([bias[..., self._here(receiver, length)], *summed], -1)


def _as_bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
