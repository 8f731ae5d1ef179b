"""A FLUX-size transformer whose weights stay in host memory, on one GPU of which 8 GB may be used.

Weights are random, in FP8 as diffusers' layerwise casting stores them (cast to the dtype of the computation in each
layer). A pass has to take no longer than its law says, docs/weights.md: of each block the longer of its own computation
and of the copy of the next one. Beside it diffusers' own group offload of the same network, block by block in a stream.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.battery.timing import (
    Row,
    begin_late,
    instant,
    left_out,
    models,
    on_device,
    seconds_between,
    seconds_of,
    turns_of,
    wait,
)
from benchmarks.gpu.denoisers import Denoiser
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.plan.mesh import Mesh
from patchpar.shard.weights.host_store import HostStore
from patchpar.shard.weights.packed import blocks_of
from patchpar.shard.weights.sharded import ShardedWeights

BUDGET = 8e9  # bytes
MODEL = "flux"
DEADLINE = 600.0  # seconds


def hosted(device: str) -> Iterator[Row]:
    """Yield the times of a pass and the most memory of the device, with weights in each way."""
    yield from left_out(device, [MODEL])
    for name, denoiser in models(device, [MODEL]):
        dtype = next(denoiser.network.parameters()).dtype
        denoiser.network.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
        with on_device(device), torch.no_grad():
            yield from _rows(device, name, denoiser)


def _rows(device: str, name: str, denoiser: Denoiser) -> Iterator[Row]:
    def forward() -> object:
        return denoiser.network(**denoiser.call)

    seconds, most = _measured(device, forward)
    yield {"model": name, "weights": "on the device", "s": seconds, "GB": most / 1e9}
    of_block = _block_seconds(device, denoiser.network, forward)
    with _hosted_weights(device, denoiser.network) as (weights, store), _budget(device):
        copies = _copy_seconds(device, weights, store)
        law = sum(max(own, copy) for own, copy in zip(of_block, [*copies[1:], copies[0]], strict=True))
        seconds, most = _measured(device, forward)
        yield {
            **{"model": name, "weights": "`weights=hosted`", "s": seconds, "GB": most / 1e9},
            **{"law, s": law, "of the law": seconds / law, "GB/s": _num_bytes(weights) / sum(copies) / 1e9},
        }
    if device == "cuda":
        _offload_groups(device, denoiser.network)
        with _budget(device):
            seconds, most = _measured(device, forward)
        yield {"model": name, "weights": "group offload of diffusers", "s": seconds, "GB": most / 1e9}


@contextmanager
def _hosted_weights(device: str, network: nn.Module) -> Iterator[tuple[ShardedWeights, HostStore]]:
    """Context in which the blocks of the network are in host memory, and this rank is alone."""
    transport = SharedMemoryTransport(0, {}, torch.device(device, 0 if device == "cuda" else None), DEADLINE)
    store = HostStore(Mesh(0, range(1), patch=1)["patch"], transport.device)
    weights = ShardedWeights(network, store)
    weights.join(Communicator(transport))
    try:
        yield weights, store
    finally:
        weights.restore()


@contextmanager
def _budget(device: str) -> Iterator[None]:
    """Context in which this process may use BUDGET bytes of the GPU: an allocation beyond it fails."""
    if device != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(BUDGET / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _offload_groups(device: str, network: Any) -> None:
    network.enable_group_offload(
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        non_blocking=True,
    )


def _measured(device: str, forward: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of a pass, and the most bytes of the device's memory in all passes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(device, forward).seconds
    return seconds, torch.cuda.max_memory_allocated() if device == "cuda" else 0.0


def _copy_seconds(device: str, weights: ShardedWeights, store: HostStore) -> list[float]:
    """Return how long the bytes of each block take into a slot, with nothing beside."""
    slot = torch.empty(max(map(store.rows, weights.blocks)), dtype=torch.uint8, device=store.device)
    starts = [store.bring(index, slot) for index in range(len(weights.blocks))]
    return [seconds_of(device, lambda start=start: start().wait()).seconds for start in starts]


def _block_seconds(device: str, network: nn.Module, forward: Callable[[], object]) -> list[float]:
    """Return the median seconds from the beginning of each block to that of the next one, with its weights there.

    What comes before the first block belongs to the last one: its copy is under way then too.
    """
    begun: list[Any] = []

    def note(*_: object) -> None:
        begun.append(instant(device))

    def once() -> list[float]:
        begun.clear()
        begin_late(device)
        note()
        forward()
        note()
        wait(device)
        first, *spent = [seconds_between(before, after) for before, after in pairwise(begun)]
        return [*spent[:-1], spent[-1] + first]

    hooks = [block.register_forward_pre_hook(note) for block in blocks_of(network).values()]
    turns = [once() for _ in range(turns_of(device)[1])]
    for hook in hooks:
        hook.remove()
    return [statistics.median(each) for each in zip(*turns, strict=True)]


def _num_bytes(weights: ShardedWeights) -> int:
    return sum(block.num_bytes for block in weights.blocks)
