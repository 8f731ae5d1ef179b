"""One or more attention layers with stale keys, without a model: what ranks compute, and what the docs say of it.

Queries, keys and values are noise, new in each evaluation, so that nothing follows from the one before by itself. The
oracle has the tokens of all ranks, and computes softmax by its definition in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.emulation.sight import LEAST_BEFOREHAND, corrected_tokens, part_of_line
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.bands import Bands
from patchpar.plan.exchange_policy import CachedPartials, ExchangePolicy, StaleKV
from patchpar.plan.kv_selection import AllRows, NearRows, TokensAcross
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention.stale import attend_with_past
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.state import StaleState
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.strategies import parse_strategy
from tests.conformance.stand_in import StandIn
from tests.tensors import noise, relative
from tests.unit.threads import on_threads

BATCH, HEADS, WIDTH, SCALE = 2, 2, 4, 0.7
TIMES = (0.9, 0.8, 0.6, 0.55, 0.5, 0.3, 0.28, 0.2, 0.1, 0.06, 0.02)
SAME = 2e-5


@dataclass(frozen=True)
class Case:
    """So many `rows` of tokens of each rank. `ran`: evaluations in which the layers run; `exact`: which of them are.

    `columns`: tokens of a row in the first layer, and in each layer so many more as it is `wider`.

    `text`: tokens of text, or those of each rank of one that is split. `hidden`: image tokens at the end that a
    mask hides; None: the mask has one column, for all keys. `key_heads`: fewer than there are heads of queries, if
    any. `is_frozen`: nothing is sent after exact steps. `still_from`: evaluation from which queries, keys and
    values no longer change. `by_owners`: tokens are extrapolated by their owners, as where they are sent late.
    `branch`: 1 where another branch of guidance is called before it, in all steps. `skipped`: layers that do not
    run in an evaluation. `fails_at`: the evaluation and the layer before which the call raises.
    """

    strategy: str
    rows: tuple[int, ...] = (2, 3)
    ran: tuple[int, ...] = (0, 1, 2, 3)
    exact: tuple[int, ...] = (0,)
    layers: int = 1
    columns: int = 3
    wider: int = 0
    text: int | tuple[int, ...] = 0
    hidden: int | None = 0
    key_heads: int = HEADS
    is_frozen: bool = False
    by_owners: bool = False
    still_from: int = 99
    branch: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    fails_at: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.strategy}-rows={self.rows}-text={self.text}-ran={self.ran}-exact={self.exact}"

    @cached_property
    def policy(self) -> ExchangePolicy:
        """What the strategy does."""
        policy: ExchangePolicy = parse_strategy(self.strategy).policy
        return replace(policy, warmup_steps=1)

    @property
    def num_text(self) -> int:
        """Tokens of text."""
        return self.text if isinstance(self.text, int) else sum(self.text)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the tokens of each rank are, among those of the text and the image."""
        starts = accumulate((self.columns * rows for rows in self.rows), initial=self.num_text)
        return list(pairwise(starts))

    @property
    def total(self) -> int:
        """Tokens of the text and the image."""
        return self.spans[-1][1]

    def at(self, layer: int) -> Case:
        """The case of a layer."""
        return replace(self, columns=self.columns + layer * self.wider) if self.wider else self

    def layers_of(self, evaluation: int) -> list[int]:
        """The layers that run in an evaluation."""
        return [layer for layer in range(self.layers) if (evaluation, layer) not in self.skipped]

    def before(self, evaluation: int, layer: int) -> int:
        """The evaluation in which a layer ran before this one."""
        return max(each for each in self.ran if each < evaluation and (each, layer) not in self.skipped)

    def whole(self, evaluation: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, N, L, D] of everything."""
        seed = 100 * min(evaluation, self.still_from) + layer + 10000 * self.branch
        query = noise(BATCH, HEADS, self.total, WIDTH, seed=seed)
        key, value = noise(2, BATCH, self.key_heads, self.total, WIDTH, seed=seed + 50)
        return query, key, value

    @property
    def mask(self) -> Tensor | None:
        """What is added to logits, [1, 1, 1, L]."""
        if self.hidden is None:
            return torch.ones(1, 1, 1, 1)
        if not self.hidden:
            return None
        found = noise(1, 1, 1, self.total, seed=7)
        found[..., -self.hidden :] = -torch.inf
        return found


def predicted(
    transport: Transport, *cases: Case, kernel: Any = None, facts: Callable[[StaleState], Any] | None = None
) -> list[Any]:
    """What each layer returns in each evaluation of the last of some images, on one rank.

    `facts`: what is returned after each evaluation instead, of the state then.
    """
    case, found = cases[-1], list[Any]()
    axis = Axis("patch", transport.rank, len(case.rows), tuple(range(len(case.rows))))
    history = StaleState(Communicator(transport), case.policy, StepClock())
    patch = LocalPatch(history.comm, axis, policy=case.policy, cache=history.cache)
    for each in cases:
        patch.bands, patch.frozen = Bands((0, *accumulate(each.rows))), each.is_frozen
        history.clock.reset()
        history.reset()
        found = []
        with nullcontext() if each.fails_at is None else suppress(ArithmeticError):
            for outputs in _image(each, patch, history, kernel):
                found.append(outputs if facts is None else facts(history))
    return found


def _image(case: Case, patch: LocalPatch, history: StaleState, kernel: Any) -> Iterator[list[Tensor]]:
    for evaluation in range(case.ran[-1] + 1):
        if case.branch:
            _evaluated(replace(case, branch=0), evaluation, patch, history, kernel)
        if evaluation in case.ran:
            yield _evaluated(case, evaluation, patch, history, kernel)
        history.clock.tick()
    history.cache.settle()


def _evaluated(case: Case, evaluation: int, patch: LocalPatch, history: StaleState, kernel: Any) -> list[Tensor]:
    history.clock.next_call()
    is_fresh = history.begin(case.rows)
    assert not (is_fresh and evaluation not in case.exact)
    patch.fresh = evaluation in case.exact
    patch.step_ratio = history.step_ratio(TIMES[evaluation])
    found = []
    for layer in case.layers_of(evaluation):
        if case.fails_at == (evaluation, layer):
            raise ArithmeticError("not to be computed")
        entry = patch.entry(f"layer {layer}", patch.policy.context)
        assert entry is not None
        text = None if isinstance(case.text, int) else TokenSlots(case.text)
        call = _call_of(case.at(layer), evaluation, layer, patch.group_rank)._replace(kernel=kernel)
        grid = LevelGrid(patch.bands, TokensAcross(case.at(layer).columns), -2)
        found.append(attend_with_past(patch, f"layer {layer}", grid, call, entry, text).clone())
    history.cache.end()
    return found


def _call_of(case: Case, evaluation: int, layer: int, rank: int) -> AttentionCall:
    start, stop = case.spans[rank]
    first, end = 0, case.num_text
    if not isinstance(case.text, int):
        first = sum(case.text[:rank])
        end = first + case.text[rank]
    query, key, value = case.whole(evaluation, layer)
    parts = (torch.cat([x[:, :, first:end], x[:, :, start:stop]], 2) for x in (query, key, value))
    return AttentionCall(*parts, case.mask, scale=SCALE, enable_gqa=case.key_heads < HEADS)


@dataclass(frozen=True)
class Seen:
    """Keys and values [B, M, l, D] that a rank attends to, and what is added to their logits, [l]."""

    key: Tensor
    value: Tensor
    bias: Tensor


def oracle(case: Case, rank: int) -> list[list[Tensor]]:
    """What each layer is to return in each evaluation, on one rank."""
    return [
        [_attention(case.at(layer), evaluation, layer, rank) for layer in case.layers_of(evaluation)]
        for evaluation in case.ran
    ]


def _attention(case: Case, evaluation: int, layer: int, rank: int) -> Tensor:
    query = _call_of(case, evaluation, layer, rank).query.double()
    here = _tokens(case, evaluation, layer, [(0, case.num_text), case.spans[rank]])
    others = [other for other in range(len(case.rows)) if other != rank]
    if isinstance(case.policy.context, CachedPartials):
        asked = _refreshed(case, evaluation, layer, case.policy.context.refresh)
        of_others = [_tokens(case, asked[1], layer, [case.spans[other]]) for other in others]
        cached = _partial(_call_of(case, asked[0], layer, rank).query.double(), of_others)
        out, lse = (torch.stack(each) for each in zip(_partial(query, [here]), cached, strict=True))
        return (out * lse.softmax(0).unsqueeze(-1)).sum(0)
    seen = [_seen(case, evaluation, layer, other, rank) for other in others]
    return _partial(query, [here, *(each for each in seen if each is not None)])[0]


def _partial(query: Tensor, seen: Sequence[Seen]) -> tuple[Tensor, Tensor]:
    joined = (torch.cat(each, 2) for each in ([x.key for x in seen], [x.value for x in seen]))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in joined)
    logits = SCALE * query @ key.mT + torch.cat([x.bias for x in seen])
    return logits.softmax(-1) @ value, logits.logsumexp(-1)


def _refreshed(case: Case, evaluation: int, layer: int, refresh: int) -> tuple[int, int]:
    """The evaluations of the queries and of the keys whose partial attention is in the cache."""
    if evaluation in case.exact:
        return evaluation, evaluation
    if (evaluation + layer) % refresh == 0 and not case.is_frozen:
        return evaluation, evaluation - 1
    return _refreshed(case, evaluation - 1, layer, refresh)


def _tokens(case: Case, evaluation: int, layer: int, spans: Sequence[tuple[int, int]]) -> Seen:
    _, key, value = (x.double() for x in case.whole(evaluation, layer))
    bias = torch.zeros(case.total) if case.mask is None else case.mask.flatten().expand(case.total)
    at = torch.cat([torch.arange(*span) for span in spans])
    return Seen(key[:, :, at], value[:, :, at], bias[at].double())


def _seen(case: Case, evaluation: int, layer: int, sender: int, receiver: int) -> Seen | None:
    """What a rank attends to of another's tokens: those of the last evaluation, led on, corrected and averaged."""
    fresh = _tokens(case, evaluation, layer, [case.spans[sender]])
    options = case.policy.context
    assert isinstance(options, StaleKV)
    if evaluation in case.exact:
        return fresh
    exact = max(each for each in case.exact if each < evaluation)
    of_step = exact if case.is_frozen else case.before(evaluation, layer)
    last = _tokens(case, of_step, layer, [case.spans[sender]])
    if not case.is_frozen:
        led = _led_on(case, evaluation, layer, sender) if options.extrapolated else last
        pairs = ((fresh.key, led.key, last.key), (fresh.value, led.value, last.value))
        if options.correction != "none":
            along = _along(case, evaluation, layer, sender) if case.by_owners else (None, None)
            led = Seen(
                *(corrected_tokens(options.correction, *each, part) for each, part in zip(pairs, along, strict=True)),
                last.bias,
            )
        last = led
    return _selected(case, last, sender, receiver)


def _led_on(case: Case, evaluation: int, layer: int, sender: int) -> Seen:
    last = _tokens(case, evaluation - 1, layer, [case.spans[sender]])
    if not {evaluation - 1, evaluation - 2} <= set(case.ran):
        return last
    before = _tokens(case, evaluation - 2, layer, [case.spans[sender]])
    now, then, earlier = (TIMES[evaluation - age] for age in range(3))
    ratio = min(2.0, (now - then) / (then - earlier))
    ahead = (new + ratio * (new - old) for new, old in ((last.key, before.key), (last.value, before.value)))
    return Seen(*ahead, last.bias)


def _along(case: Case, evaluation: int, layer: int, owner: int) -> tuple[Tensor, Tensor]:
    """Which part of the line of the keys, and of the values, an owner goes: that which they went in the last step."""
    if not {evaluation - 1, evaluation - 2} <= set(case.ran):
        least = torch.tensor(LEAST_BEFOREHAND, dtype=torch.float64)
        return least, least
    now, old = (_tokens(case, evaluation - age, layer, [case.spans[owner]]) for age in (1, 2))
    ahead, kind = _led_on(case, evaluation - 1, layer, owner), case.policy.context.correction
    return part_of_line(kind, now.key, ahead.key, old.key), part_of_line(kind, now.value, ahead.value, old.value)


def _selected(case: Case, seen: Seen, sender: int, receiver: int) -> Seen | None:
    """All tokens; or those of the nearest rows, and averages of the others where they are pooled."""
    options = case.policy.context
    assert isinstance(options, StaleKV)
    selection: Any = options.narrow_to or options.selection
    if selection == AllRows():
        return seen
    rows = case.rows[sender]
    is_near, fraction = abs(sender - receiver) == 1, getattr(selection, "fraction", getattr(selection, "band", None))
    count = max(1, round(fraction * rows)) if is_near else 0
    near = range(rows - count, rows) if sender < receiver else range(count)
    windows = [[row * case.columns + column] for row in near for column in range(case.columns)]
    if not isinstance(selection, NearRows):
        far, pool = [row for row in range(rows) if row not in near], selection.pool
        for top in range(0, len(far), pool):
            for left in range(0, case.columns, pool):
                columns = range(left, min(case.columns, left + pool))
                windows.append([row * case.columns + column for row in far[top : top + pool] for column in columns])
    if not windows:
        return None
    key, value = (torch.cat([x[:, :, at].mean(2, keepdim=True) for at in windows], 2) for x in (seen.key, seen.value))
    return Seen(key, value, torch.cat([seen.bias[at].logsumexp(0, keepdim=True) for at in windows]))


def on_ranks(*cases: Case, **options: Any) -> list[list[list[Tensor]]]:
    """What `predicted` returns on each rank, where ranks have memory in common."""
    run = torch.no_grad()(lambda transport: predicted(transport, *cases, **options))
    return _none_failed(on_threads(len(cases[-1].rows), run))


def on_nccl(*cases: Case, collective: bool = True, **options: Any) -> list[list[list[Tensor]]]:
    """What `predicted` returns on each rank over NCCL's simulator, which finds no fault.

    Not `collective`: over single messages, whose memory is read at any time until they have been received.
    """
    stand_in = StandIn(len(cases[-1].rows))

    def run(transport: TorchTransport) -> list[Any]:
        transport.collectives = transport.collectives if collective else None
        return predicted(transport, *cases, **options)

    found = _none_failed(stand_in.run(run))
    assert stand_in.faults == []
    return found


def _none_failed(found: list[Any]) -> list[Any]:
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def errors(case: Case, found: list[list[list[Tensor]]]) -> list[float]:
    """The largest relative error of each evaluation, over ranks and layers."""
    of_ranks = [
        [max(map(relative, *each)) for each in zip(got, oracle(case, rank), strict=True)]
        for rank, got in enumerate(found)
    ]
    return [max(each) for each in zip(*of_ranks, strict=True)]
