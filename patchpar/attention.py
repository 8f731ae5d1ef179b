"""Self-attention over the tokens of the whole picture, as a diffusers hook.

    this step     own queries against our own keys while the others' come, merged by log-sum-exp
    last step     own queries against our own keys of this step and what is held of the others', see `context`

The processor of the layer runs as it is; only its call of scaled_dot_product_attention is answered differently.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchpar.context import KeysValues, RemotePartials, RemoteTokens
from patchpar.errors import UnsupportedModel
from patchpar.exchange import Gather, Gathering
from patchpar.layers import Partial, attend, merge_partials
from patchpar.memory import Slot
from patchpar.sequence.call import Shared
from patchpar.sequence.modes import attend_together
from patchpar.share import Share
from patchpar.tokens import Grid
from patchpar.transport import Spec
from patchpar.treatment import CachedPartials, Context

DRIFT_STRIDE = 16  # tokens


class AttentionHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Self-attention over the tokens of the whole picture: the processor runs as it is, its attention call does not."""

    def __init__(self, share: Share, where: str) -> None:
        super().__init__()
        self.share, self.where = share, where

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces Attention.forward."""
        if not self.share.active:
            return self.fn_ref.original_forward(*args, **kwargs)
        with _AttentionOverShares(self.share, self.where) as mode:
            result = self.fn_ref.original_forward(*args, **kwargs)
        if mode.calls == 0:
            processor = type(getattr(module, "processor", module)).__name__
            raise UnsupportedModel(
                f"{self.where}: the attention processor {processor} does not call scaled_dot_product_attention, so its "
                "keys cannot be shared. Use the default processor: pipe.unet.set_default_attn_processor()"
            )
        return result


class _AttentionOverShares(TorchFunctionMode):
    def __init__(self, share: Share, where: str) -> None:
        super().__init__()
        self.share, self.where, self.calls = share, where, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return attend_over_shares(self.share, self.where, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend_over_shares(  # noqa: PLR0913 - the signature is torch's
    share: Share,
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Own queries against everybody's keys, of this step or of the last one. Raises UnsupportedModel."""
    if attn_mask is not None or is_causal or dropout_p or enable_gqa:
        raise UnsupportedModel(
            f"{where}: spatial self-attention with a mask, causality or dropout cannot be split: use cfg=2 or data=N"
        )
    asked = Asked(query, KeysValues(key.transpose(1, 2), value.transpose(1, 2)), scale)
    grid, slot = share.grid(asked.own.k_BlND.shape[1]), share.slot(where, share.treatment.context)
    if slot is None:
        return _attend_together(share, where, grid, asked)
    if share.treatment.resync is not None:
        _note_drift(share, slot, asked.own.k_BlND)
    if isinstance(share.treatment.context, CachedPartials):
        return _attend_beside_partials(share, where, grid, asked, slot)
    return _attend_beside_tokens(share, where, grid, asked, slot)


class Asked(NamedTuple):
    """One attention call: queries [B, N, l, D], own keys and values, and the factor on logits (None: torch's)."""

    query: Tensor
    own: KeysValues
    scale: float | None


def _attend_together(share: Share, where: str, grid: Grid, asked: Asked) -> Tensor:
    """With everybody's keys of this step, in the way that was asked for."""
    sizes = tuple(grid.num_tokens(place) for place in range(share.axis.size))
    k_BNlD, v_BNlD = _by_head(asked.own)
    shared = Shared(q_BNlD=asked.query, k_BMlD=k_BNlD, v_BMlD=v_BNlD, sizes=sizes, place=share.place, scale=asked.scale)
    return attend_together(share.treatment.keys, share.door, share.axis, where, shared)


def _attend_now(share: Share, where: str, grid: Grid, asked: Asked, others: dict[int, KeysValues]) -> Tensor:
    """With everybody's keys of this step, which are left in `others` for the next."""
    pending = _gather(share, where, grid, asked.own)

    def partials() -> Iterator[Partial]:
        yield attend(asked.query, *_by_head(asked.own), asked.scale)
        for place, tensors in pending.others():
            others[place] = KeysValues(*tensors)
            yield attend(asked.query, *_by_head(others[place]), asked.scale)

    return merge_partials(partials()).out_BNlD


def _gather(share: Share, where: str, grid: Grid, own: KeysValues) -> Gathering:
    batch, _, heads, _ = own.k_BlND.shape

    def specs(place: int) -> list[Spec]:
        return [Spec((batch, grid.num_tokens(place), heads, x.shape[-1]), x.dtype) for x in own]

    return Gather(share.door, share.axis, "kv", where).start(own, specs)


def _by_head(both: KeysValues) -> tuple[Tensor, Tensor]:
    return both.k_BlND.transpose(1, 2), both.v_BlND.transpose(1, 2)


def _attend_beside_tokens(share: Share, where: str, grid: Grid, asked: Asked, slot: Slot) -> Tensor:
    """With a selection of everybody's tokens of the last step; ours leave for the next."""
    options, memory = share.treatment.context, share.memory
    assert isinstance(options, Context)
    assert memory is not None
    if slot.state is None:
        slot.state = RemoteTokens(options, share.axis, grid, asked.own, joined_anew=share.treatment.published)
    state: RemoteTokens = slot.state
    state.arrived(slot.take())
    if share.fresh:
        others: dict[int, KeysValues] = {}
        result = _attend_now(share, where, grid, asked, others)
        state.remember(asked.own, others, continues=memory.continues)
        return result
    if not share.frozen:
        state.lead_on(share.ahead)
        send = memory.send if share.treatment.published else memory.send_at_once
        slot.coming = send(state.part(asked.own), where)
    return state.attend(asked.query, asked.own, asked.scale)


def _attend_beside_partials(share: Share, where: str, grid: Grid, asked: Asked, slot: Slot) -> Tensor:
    """With what is kept of the attention to others' tokens; this layer's turn to renew it comes now and then."""
    options, memory = share.treatment.context, share.memory
    assert isinstance(options, CachedPartials)
    assert memory is not None
    layer, memory.attentions = memory.attentions, memory.attentions + 1
    if slot.state is None:
        slot.state = RemotePartials(options.refresh, share.axis, grid)
    state: RemotePartials = slot.state
    if share.fresh:
        slot.drop()
        whole = dict(_gather(share, where, grid, asked.own).others())
        state.cache(asked.query, [KeysValues(*tensors) for tensors in whole.values()], asked.scale)
        if state.is_due(memory.evaluation + 1, layer):  # what its turn needs is here already
            slot.keep({share.axis.ranks[place]: tensors for place, tensors in whole.items()}, slot.own)
        return state.attend(asked.query, asked.own, asked.scale)
    if state.is_due(memory.evaluation, layer) and not share.frozen:
        received = slot.take()
        if received:
            state.cache(asked.query, [KeysValues(*tensors) for tensors in received.values()], asked.scale)
    if state.is_due(memory.evaluation + 1, layer) and not share.frozen:
        slot.coming = memory.send_at_once(state.part(asked.own), where)
    return state.attend(asked.query, asked.own, asked.scale)


def _note_drift(share: Share, slot: Slot, key_BlND: Tensor) -> None:
    """How far our keys have moved since the last step, from every sixteenth token."""
    assert share.memory is not None
    sample = key_BlND[:, ::DRIFT_STRIDE].to(torch.float32, copy=True)  # a view would keep all of it
    if slot.own is not None and slot.own.shape == sample.shape:
        share.memory.drift += torch.stack([(sample - slot.own).square().sum(), sample.square().sum()])
    slot.own = sample
