"""Diffusers' own context parallelism on CPU ranks, to be measured beside ours.

`enable_parallelism` asks for an accelerator and cannot be called where there is none. So what it does is done here by
hand: a mesh over the default group, the configuration on every attention processor, and the model's own plan. The mesh
is over gloo, which is what diffusers would use on CPUs.

Its ring needs an attention kernel that returns the log-sum-exp, and diffusers has none for CPUs: `ring_error` shows
what it says. `lent_kernel` lends it the one inside of torch, which `scaled_dot_product_attention` runs on CPUs anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Step = Callable[[dict[str, Any]], Any]


class Lent(str, Enum):
    """Names of attention kernels of our own in diffusers' registry."""

    CPU_FLASH = "cpu_flash"


def split_by_diffusers(model: nn.Module, *, ulysses: int = 1, ring: int = 1) -> Step:
    """A denoiser call of `model` as diffusers splits it between the ranks of the default group."""
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.hooks import apply_context_parallel
    from torch.distributed import get_rank, get_world_size, init_device_mesh

    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    among = ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring)
    config = ParallelConfig(context_parallel_config=among)
    config.setup(get_rank(), get_world_size(), torch.device("cpu"), mesh=mesh)
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config"):
            module.processor._parallel_config = config
    apply_context_parallel(model, among, model._cp_plan)
    return lambda call: model(**call)


def ring_error(step: Step, call: dict[str, Any]) -> str:
    """What diffusers says to a ring without a lent kernel; empty where it has learnt to do it."""
    try:
        step(call)
    except ValueError as error:
        return str(error)
    return ""


@contextmanager
def lent_kernel() -> Iterator[None]:
    """While open, diffusers attends with torch's CPU kernel, log-sum-exp and all."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    if Lent.CPU_FLASH not in Registry.list_backends():
        Registry.register(Lent.CPU_FLASH, supports_context_parallel=True)(_cpu_flash)
    before, _ = Registry.get_active_backend()
    Registry.set_active_backend(Lent.CPU_FLASH)
    try:
        yield
    finally:
        Registry.set_active_backend(before)


def _cpu_flash(  # noqa: PLR0913 - diffusers says what a kernel is called with
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    if _parallel_config is None:  # attention to the text
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return functional.scaled_dot_product_attention(*heads_first, attn_mask=attn_mask, scale=scale).transpose(1, 2)
    return _templated_context_parallel_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        forward_op=_flash_forward,
        backward_op=None,
        _parallel_config=_parallel_config,
    )


def _flash_forward(
    context: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *options: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """Output [B, L, N, D] and log-sum-exp [B, L, N]."""
    dropout_p, is_causal, scale, *_rest = options
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)
