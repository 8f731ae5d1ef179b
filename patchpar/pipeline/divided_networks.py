"""Networks of a pipeline that a plan divides, what a rank keeps of each, and methods that need none of their values."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.file_pages import FilePages
from patchpar.models.info import denoisers_of, is_name_of_denoiser, networks_of
from patchpar.plan.mesh import Axis
from patchpar.plan.plan import Plan
from patchpar.shard.weights.device_shards import DeviceShards
from patchpar.shard.weights.host_store import HostStore
from patchpar.shard.weights.noted_host import NotedHost
from patchpar.shard.weights.packed import CopyMemory, packed_blocks, resident_of
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.shard.weights.stores import BlockStore

ENCODER = "text_encoder"  # what the names of text encoders begin with
NEED_NO_VALUES = frozenset(
    {
        *("load_lora_weights", "unload_lora_weights", "unload_lora", "set_adapters", "set_adapter"),
        *("delete_adapters", "enable_lora", "disable_lora", "enable_adapters", "disable_adapters"),
        *("set_progress_bar_config", "enable_lora_hotswap", "set_ip_adapter_scale"),
        *("enable_freeu", "disable_freeu", "enable_cache", "disable_cache"),
        *("enable_vae_tiling", "disable_vae_tiling", "enable_vae_slicing", "disable_vae_slicing"),
    }
)
"""Methods that put modules beside weights or take them away, or set switches, by their last name.

They read and change no weight.
"""
log = logging.getLogger(__name__)


def needs_no_values(method: str) -> bool:
    """Return whether a method of a pipeline, or "transformer.method" of a network, leaves divided weights as they are.

    As do all methods of other components, such as "vae.enable_tiling".
    """
    owner, is_of_component, _ = method.partition(".")
    is_divided = is_name_of_denoiser(owner) or owner.startswith(ENCODER)
    return (bool(is_of_component) and not is_divided) or method.rpartition(".")[2] in NEED_NO_VALUES


def part_bytes(pipe: Any, plan: Plan, axis: Axis, device: torch.device) -> int:
    """Return the bytes that this rank keeps of what `each_in_shards` divides. Nothing changes.

    Raises UnsupportedModel for a denoiser that cannot be divided, PlanError for a network that is in shards already.
    """
    total = 0
    for network in _divided(pipe).values():
        refuse_divided(network)
        try:
            total += bytes_of_part(network, plan, axis, device, on_the_host=True)
        except UnsupportedModel:
            if network not in text_encoders_of(pipe).values():
                raise
    return total


def refuse_divided(network: nn.Module) -> None:
    """Raise PlanError for a network of which another ParallelPipeline of this process has the weights in shards."""
    hooks = (hook for module in network.modules() for hook in module._forward_pre_hooks.values())
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks)
    if any(isinstance(owner, ShardedWeights) for owner in owners):
        raise PlanError(
            f"the weights of this {type(network).__name__} are divided by another ParallelPipeline of this process, "
            "which has the same network: call its restore() before, or give this one a copy that was made before both"
        )


def bytes_of_part(network: nn.Module, plan: Plan, axis: Axis, device: torch.device, *, on_the_host: bool) -> int:
    """Return the bytes that a rank keeps of a network. `on_the_host`: see `packed_blocks`. Raises UnsupportedModel."""
    blocks = packed_blocks(network, device, on_the_host=on_the_host)
    whole = resident_of(len(blocks), plan.resident)
    return sum(block.shard_bytes(axis.size) for number, block in enumerate(blocks) if number not in whole)


def each_in_shards(
    pipe: Any, plan: Plan, axis: Axis, device: torch.device, copy: CopyMemory
) -> Iterator[tuple[nn.Module, ShardedWeights | None]]:
    """Yield each denoiser and text encoder with this rank's part of its weights, on the host so far, copied by `copy`.

    None for a text encoder that stays whole, which is logged. Raises UnsupportedModel for such a denoiser.
    """
    pages = FilePages() if device.type == "cpu" and plan.weights == "sharded" else None  # once, since it takes long
    for name, network in _divided(pipe).items():
        try:
            store = store_for(plan, axis, device, pages)
            yield network, ShardedWeights(network, store, resident=plan.resident, copy=copy)
        except UnsupportedModel as error:  # the same on all ranks
            if network not in text_encoders_of(pipe).values():
                raise
            yield network, None
            log_whole(name, axis, error)


def _divided(pipe: Any) -> dict[str, nn.Module]:
    """Return denoisers and text encoders by name; one that has several names, by the first of them."""
    found: dict[str, nn.Module] = {}
    for name, each in {**denoisers_of(pipe), **text_encoders_of(pipe)}.items():
        if each not in found.values():
            found[name] = each
    return found


def text_encoders_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the text encoders of a pipeline by name."""
    return {name: each for name, each in networks_of(pipe).items() if name.startswith(ENCODER)}


def store_for(plan: Plan, axis: Axis, device: torch.device, pages: FilePages | None = None) -> BlockStore:
    """Return an empty store for a rank's part of a network. `pages`: see `DeviceShards`."""
    if plan.weights == "hosted" and device.type == "meta":
        return NotedHost(axis, device)
    return HostStore(axis, device) if plan.weights == "hosted" else DeviceShards(axis, device, pages)


def log_whole(name: str, axis: Axis, error: UnsupportedModel) -> None:
    """Log, on the first rank of the axis, that a network stays whole, and why."""
    if axis.rank == 0:
        log.warning("%s stays whole on every rank: %s", name, error)
