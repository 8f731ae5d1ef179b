"""Keys and values that a plan keeps from step to step, by the attention of a call on one device."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from patchpar.plan.bands import Bands, starts_of
from patchpar.plan.exchange_policy import CachedPartials, ExchangePolicy, StaleKV
from patchpar.plan.kv_selection import TokensAcross
from patchpar.plan.mesh import Axis
from patchpar.plan.plan import Plan
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_grid import LevelGrid

STATISTICS = 4  # bytes of a number in fp32


class AttentionSize(NamedTuple):
    """An attention of tokens to themselves: keys are [batch, heads, tokens, width] of `itemsize` bytes."""

    batch: int
    heads: int
    tokens: int
    width: int
    itemsize: int

    @classmethod
    def of(cls, call: AttentionCall) -> "AttentionSize | None":
        """Return that of a call; None where queries attend to other tokens, such as those of a text."""
        call = call if call.query.ndim == 4 else call.with_heads()
        batch, heads, tokens, width = call.key.shape
        if call.query.shape[-2] != tokens:
            return None
        return cls(batch, heads, tokens, width, call.key.element_size())

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all tokens."""
        return 2 * math.prod(self)


Attentions = Mapping[AttentionSize, int]
"""How many there are of each size in a denoising step."""


def kept_bytes(plan: Plan, attentions: Attentions, of_stage: float, *, late: bool = False) -> int:
    """Return the bytes that a rank keeps of keys and values, and receives them in.

    `of_stage`: the part of the attentions that the busiest stage has. `late`: ranks send in the step that reads, as
    over NCCL. Text counts as tokens of the image.
    """
    policy = getattr(plan.strategy, "policy", None)
    if policy is None or not policy.remembers:
        return 0
    if plan.strategy.axis == "stage":
        found = _of_pieces(policy, getattr(plan.strategy, "pieces", 1), attentions)
    else:
        found = _of_patches(policy, plan.patch, attentions, late=late) if plan.patch > 1 else 0
    return math.ceil(found * of_stage / (plan.cfg * plan.tensor))


def _of_patches(policy: ExchangePolicy, patches: int, attentions: Attentions, *, late: bool) -> int:
    total = shared = 0
    for size, count in attentions.items():
        if size.tokens < patches:
            continue
        if isinstance(policy.context, CachedPartials):
            total += count * _partial_bytes(size, patches)
        elif policy.context is not None:
            layout = _layout(policy, policy.context, size, patches, late=late)
            total += count * (layout.num_bytes.total + layout.message_bytes)
            shared = max(shared, layout.workspace_bytes + layout.fit_bytes + layout.window_bytes)
    return total + shared


def _layout(policy: ExchangePolicy, options: StaleKV, size: AttentionSize, patches: int, *, late: bool) -> StaleLayout:
    columns = next(each for each in range(math.isqrt(size.tokens), 0, -1) if size.tokens % each == 0)
    if size.tokens // columns < patches:
        columns = 1
    grid = LevelGrid(Bands(starts_of(size.tokens // columns, patches)), TokensAcross(columns), -2)
    return StaleLayout(
        options,
        Axis("patch", patches // 2, patches, tuple(range(patches))),  # which has two neighbours, of three or more
        grid,
        token=(2, size.batch, size.heads, size.width),
        itemsize=size.itemsize,
        joins=policy.published or options.narrow_to is not None,
        may_wait=late,
    )


def _partial_bytes(size: AttentionSize, patches: int) -> int:
    """Return the bytes of an output for a rank's tokens, with its log-sum-exp, and of keys and values on their way."""
    own = -(-size.tokens // patches)
    output = size.batch * size.heads * own * (size.width * size.itemsize + STATISTICS)
    return output + size.num_bytes * (patches - 1) // patches


def _of_pieces(policy: ExchangePolicy, pieces: int, attentions: Attentions) -> int:
    """Return the bytes that a stage of all attentions would keep: of all tokens, and samples of each piece."""
    options, total, shared = policy.context, 0, 0
    assert isinstance(options, StaleKV)
    for size, count in attentions.items():
        layout = _layout(policy, options, size, min(pieces, size.tokens), late=False)
        total += count * ((1 + options.extrapolated) * size.num_bytes + pieces * layout.sample_bytes)
        shared = max(shared, size.num_bytes if layout.derived else 0)
    return total + shared
