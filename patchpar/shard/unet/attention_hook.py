"""Self-attention over the tokens of the whole image, as a diffusers hook.

    fresh     own queries attend to own keys while the others' arrive, merged by log-sum-exp
    stale     own queries attend to own fresh keys and the others' stored ones, `shard.attention.stale`

The layer's processor runs unchanged; only its call of scaled_dot_product_attention is replaced. A processor that
computes attention itself gets the keys and values of all ranks instead, always fresh.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AllGather
from patchpar.errors import UnsupportedModel
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from patchpar.shard.attention.stale import attend_with_past
from patchpar.shard.hooks import HookSet
from patchpar.shard.local_patch import LocalPatch, PatchHook
from patchpar.shard.processor_call import ProcessorCall
from patchpar.shard.sdpa import AttentionCall, SdpaMode, with_attention
from patchpar.shard.stale.token_grid import LevelGrid

PROJECTIONS = ("to_k", "to_v")


class AttentionHook(PatchHook):
    """Self-attention over the tokens of the whole image: the processor runs unchanged, its attention call is replaced.

    `own_kernel`: the processor does not call scaled_dot_product_attention (but baddbmm, slice by slice, or xformers).
    Then `to_k` and `to_v` read this rank's tokens and return the keys and values of all ranks. `elsewhere`: it calls
    that function by another name than the one in torch.nn.functional, so that all functions must be intercepted.
    """

    def __init__(self, patch: LocalPatch, where: str, *, own_kernel: bool = False, elsewhere: bool = False) -> None:
        super().__init__(patch, where)
        self.own_kernel, self._elsewhere = own_kernel, elsewhere
        self._call = ProcessorCall()

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces Attention.forward. Raises UnsupportedModel for a processor that cannot be split."""
        if not self.patch.active:
            return self.fn_ref.original_forward(*args, **kwargs)
        if self.own_kernel:
            with keys_of_all(self.patch, self.where, module):
                return self.fn_ref.original_forward(*args, **kwargs)
        self._called = False
        if self._elsewhere:
            with SdpaMode(self._attend):
                result = self.fn_ref.original_forward(*args, **kwargs)
        else:
            call = (module, self.fn_ref.original_forward, args, kwargs)
            result = with_attention(self._attend, self._call.run, call, {})
        if not self._called:
            raise UnsupportedModel(
                f"{self.where}: its attention processor {_processor_of(module)} does not call "
                "scaled_dot_product_attention as the previous one did: set processors with "
                "pipe.unet.set_attn_processor(...), or restore() and wrap the pipeline again"
            )
        return result

    def _attend(self, call: AttentionCall) -> Tensor:
        self._called = True
        return attend_over_bands(self.patch, self.where, call)


class ContextHook(PatchHook):
    """Attention to a context that every rank has, such as text: nothing is exchanged, and no signature looked up."""

    def __init__(self, patch: LocalPatch, where: str = "") -> None:
        super().__init__(patch, where)
        self._call = ProcessorCall()

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces Attention.forward."""
        forward = self.fn_ref.original_forward
        if not self.patch.active:
            return forward(*args, **kwargs)
        return self._call.run(module, forward, args, kwargs)


def refusal_of_past(where: str, module: nn.Module, strategy: str) -> UnsupportedModel:
    """Return the error for a processor with which stale keys and values cannot be used."""
    return UnsupportedModel(
        f"{where}: strategy {strategy} attends to stale keys and values in scaled_dot_product_attention, which the "
        f"attention processor {_processor_of(module)} does not call: use strategy exact, or the default processor, "
        "pipe.unet.set_default_attn_processor()"
    )


def _processor_of(module: nn.Module) -> str:
    return type(getattr(module, "processor", module)).__name__


@contextmanager
def keys_of_all(patch: LocalPatch, where: str, module: nn.Module) -> Iterator[None]:
    """Context in which `to_k` and `to_v` of an attention layer return the tokens of all ranks, in image order.

    They are all-gathered whatever the attention mode. Raises UnsupportedModel where either has not been called.
    """
    asked: set[str] = set()

    def of_all(name: str, projection: nn.Module, args: Any, own: Tensor) -> Tensor:
        asked.add(name)
        return gathered_tokens(patch, where, own)

    with HookSet() as hooks:
        for name in PROJECTIONS:
            if isinstance(projection := getattr(module, name, None), nn.Module):
                hooks.after(projection, partial(of_all, name))
        yield
    if asked != set(PROJECTIONS):
        raise UnsupportedModel(
            f"{where}: its attention processor {_processor_of(module)} calls neither scaled_dot_product_attention nor "
            "to_k and to_v, so its keys cannot be shared: use pipe.unet.set_default_attn_processor(), or plan cfg=2"
        )


def gathered_tokens(patch: LocalPatch, where: str, own_BlC: Tensor) -> Tensor:
    """All-gather each rank's tokens [B, l, C] to the image's [B, L, C]. Raises ExchangeError, UnsupportedModel."""
    grid = patch.grid(own_BlC.shape[1])
    gather = AllGather(patch.comm, patch.axis, "kv", where)
    return joined_tokens(gather.parts(own_BlC.contiguous(), 1, grid.sizes), grid)


def joined_tokens(parts_BlC: Sequence[Tensor], grid: LevelGrid) -> Tensor:
    """Return tokens [B, L, C] in the order of the whole image, row by row, from the ranks' parts [B, l, C]."""
    if grid.dim == -2:
        return torch.cat(list(parts_BlC), dim=1)
    columns = [torch.unflatten(x, 1, (grid.across.columns, -1)) for x in parts_BlC]
    return torch.cat(columns, dim=2).flatten(1, 2)


def attend_over_bands(patch: LocalPatch, where: str, call: AttentionCall) -> Tensor:
    """Return attention [B, N, l, D] of this rank's queries to the keys of all ranks, fresh or stale.

    The call's keys and values [B, N, c + l, D]: tokens that all ranks have (text, as added keys), then this rank's own.
    Raises ExchangeError, UnsupportedModel.
    """
    if call.attn_mask is not None or call.is_causal or call.dropout_p or call.enable_gqa:
        raise UnsupportedModel(
            f"{where}: spatial self-attention with a mask, causality or dropout cannot be split: use cfg=2 or data=N"
        )
    if call.query.ndim == 3:
        return attend_over_bands(patch, where, call.with_heads()).squeeze(1)
    own = call.query.shape[2]
    grid, entry = patch.grid(own), patch.entry(where, patch.policy.context)
    if entry is not None:
        return attend_with_past(patch, where, grid, call, entry)
    shared = ShardedQKV(
        q_BNlD=call.query,
        k_BMlD=call.key,
        v_BMlD=call.value,
        sizes=grid.sizes,
        group_rank=patch.group_rank,
        common=call.key.shape[2] - own,  # added keys: of text, before those of the image
        common_asks=False,
        scale=call.scale,
        memory=patch.memory,
    )
    out = patch.attend(patch.policy.keys, patch.comm, patch.axis, where, shared)
    if patch.memory is not None:
        patch.memory.release()
    return out
