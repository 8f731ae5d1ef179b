"""What ranks run here: networks with sharded weights, against the same networks with whole ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.host_time import python_calls
from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport.arena import Arena
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.errors import PatchparError
from patchpar.plan.mesh import Axis, rank_sets
from patchpar.shard.compiled import uncompiled
from patchpar.shard.weights.device_shards import DeviceShards
from patchpar.shard.weights.host_segment import HostSegment
from patchpar.shard.weights.host_store import HostStore
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from patchpar.shard.weights.sharded import ShardedWeights
from tests.exact import denoisers
from tests.ranks import PoolRank
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.collectives_on_ranks import over_torch
from tests.weights import networks, quantised


def divided(this: PoolRank, network: nn.Module, kind: str = "sharded", **options: Any) -> ShardedWeights:
    return joined(network, this.comm(), this.mesh(patch=this.world)["patch"], kind, **options)


def joined(network: nn.Module, comm: Communicator, axis: Axis, kind: str = "sharded", **options: Any) -> ShardedWeights:
    """`kind`: "sharded apart" and "hosted apart" are those of ranks that cannot map each other's memory."""
    store: Any = (DeviceShards if kind.startswith("sharded") else HostStore)(axis, comm.transport.device)
    weights = ShardedWeights(network, store, **options)
    if kind.endswith("apart"):  # of this store alone: ranks may be threads
        (store._segment if isinstance(store, DeviceShards) else store._own).__class__ = SegmentElsewhere
    weights.join(comm)
    return weights


class SegmentElsewhere(HostSegment):
    """Memory that other ranks take for that of another host."""

    @property
    def address(self) -> bytes:
        return json.dumps(["elsewhere", *json.loads(super().address)[1:]]).encode()


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def equal(found: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(wanted), strict=True))


def state_of(network: nn.Module) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: (x.clone(), x.stride()) for name, x in named.items()}


def same_state(network: nn.Module, before: dict[str, tuple[Tensor, tuple[int, ...]]]) -> bool:
    now = state_of(network)
    return now.keys() == before.keys() and all(
        torch.equal(x, before[name][0]) and stride == before[name][1] for name, (x, stride) in now.items()
    )


@torch.no_grad()
def networks_with(this: PoolRank, name: str, slots: int, resident: int, kind: str = "sharded") -> dict[str, Any]:
    """Three calls of a network, the last with the order of its blocks reversed; and what was sent."""
    network, x = networks.build(name), networks.sample()
    before, wanted = state_of(network), network(x)
    weights = divided(this, network, kind, slots=slots, resident=resident)
    outside = keep_what_is_read_outside(weights, lambda: network(x))
    assert not weights.comm.traffic.bytes_sent
    outputs = [equal(network(x), wanted), equal(network(x), wanted)]
    order, network.order = network.order, tuple(reversed(network.order))
    reordered = network(x)
    network.order = order
    pointers = {id(p): p.data_ptr() for p in network.parameters()}
    outputs.append(equal(network(x), wanted))
    assert pointers == {id(p): p.data_ptr() for p in network.parameters()}, "an address has changed"
    weights.restore()
    weights.restore()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in network.modules())
    network.order = tuple(reversed(network.order))
    outputs.append(equal(network(x), reordered))
    return {"equal": outputs, "outside": outside, "restored": same_state(network, before)}


@torch.no_grad()
def with_quantised_weights(this: PoolRank, form: str, kind: str) -> dict[str, Any]:
    """Two calls of a network, and one where slots keep what they have; its bytes; and how many are in shards."""
    network, x = quantised.build(form), networks.sample()
    before, wanted = quantised.bytes_of(network), network(x)
    weights = divided(this, network, kind)
    found = [equal(network(x), wanted) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedWeights, "_start", lambda self, index: None)
        patch.setattr(ShardedWeights, "_take", lambda self, slot: None)
        weights.settle()
        weights._holds = [None] * len(weights._holds)
        weights._slots[0].zero_()
        alone = equal(network(x), wanted)
    weights.restore()
    after = quantised.bytes_of(network)
    codes = [each for block in weights.blocks for each in block.tensors if each.dtype in (torch.int8, torch.uint8)]
    return {
        "equal": [*found, equal(network(x), wanted)],
        "alone": alone,
        "restored": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "codes": len(codes),
    }


@torch.no_grad()
def bytes_of(this: PoolRank, kind: str = "sharded") -> dict[str, Any]:
    """What one rank holds and sends in two calls of a chain of four blocks, and what the blocks' shards have."""
    network, x = networks.Chain(4).eval().requires_grad_(False), networks.sample()
    weights = divided(this, network, kind)
    for _ in range(2):  # the second ends with the gather of the first block, in advance
        network(x)
    weights.settle()
    weights.comm.traffic.clear()
    copied, messages = list[int](), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        plain, send_recv = Arena.copied, SharedMemoryTransport.send_recv
        patch.setattr(Arena, "copied", lambda self, tensors: copied.append(1) or plain(self, tensors))
        patch.setattr(SharedMemoryTransport, "send_recv", lambda *each: messages.append(1) or send_recv(*each))
        for _ in range(2):
            network(x)
        weights.settle()
    shards = [block.shard_bytes(this.world) for block in weights.blocks]
    traffic = weights.comm.traffic
    return {
        "shards": shards,
        "held": weights.num_bytes,
        "whole": sum(block.num_bytes for block in weights.blocks),
        "sent": dict(traffic.bytes_sent),
        "received": dict(traffic.bytes_received),
        "rounds": dict(traffic.rounds),
        "copied": len(copied),
        "messages": len(messages),
    }


@torch.no_grad()
def calls_of_a_gather(this: PoolRank, kind: str) -> int:
    """Calls of Python to start a gather and to wait for it, with messages that have come meanwhile."""
    weights, found = divided(this, networks.build("chain"), kind), []
    meet = AllGather(weights.comm, weights.axis, "verify", "meeting")
    for index in (0, 2, 0, 2):
        started = python_calls(lambda index=index: weights._start(index))  # type: ignore[misc]
        meet.same(torch.zeros(1))
        found.append(started + python_calls(lambda: weights._take(0)))
    weights.restore()
    return min(found)


@torch.no_grad()
def written_outside_slots(this: PoolRank, kind: str) -> dict[str, Any]:
    """A network of which the last rank writes to all weights that are in no slot: whether its calls are others then.

    `in_place`: how much of the bytes of all blocks is in no slot.
    """
    network, x = networks.build("chain"), networks.sample()
    weights = divided(this, network, kind)
    wanted = network(x)
    weights.settle()
    packed = [each for block in weights.blocks for each in block.tensors]
    outside = [each for each in packed if not _is_in_a_slot(weights, each.tensor)]
    for each in outside if this.rank == this.world - 1 else ():
        each.tensor.copy_(each.tensor.flip(0))
    AllGather(weights.comm, weights.axis, "verify", "meeting").same(torch.zeros(1))
    found = network(x)
    weights.restore()
    return {
        "in place": sum(each.num_bytes for each in outside) / sum(each.num_bytes for each in packed),
        "other": not torch.equal(found, wanted),
        "stays": torch.equal(network(x), found),
    }


def _is_in_a_slot(weights: ShardedWeights, x: Tensor) -> bool:
    return any(0 <= x.data_ptr() - slot.data_ptr() < slot.numel() for slot in weights._slots)


@torch.no_grad()
def diffusers_network(
    this: PoolRank, name: str, gathered: bool, dtype: torch.dtype, kind: str = "sharded"
) -> dict[str, Any]:
    """Two calls of a network of diffusers; where not `gathered`, its slots keep what they have."""
    network, call = _built(name)
    network = network.to(dtype)
    call = {key: _cast(x, dtype) for key, x in call.items()}
    before, wanted = state_of(network), network(**call)
    with pytest.MonkeyPatch.context() as patch:
        if not gathered:
            patch.setattr(ShardedWeights, "_start", lambda self, index: None)
            patch.setattr(ShardedWeights, "_take", lambda self, slot: None)
        weights = divided(this, network, kind)
        if gathered:  # such as DiT's first embedding, which the network itself calls
            keep_what_is_read_outside(weights, lambda: network(**call))
        found = [equal(network(**call), wanted) for _ in range(2)]
    weights.restore()
    return {"equal": found, "restored": same_state(network, before), "blocks": len(weights.blocks)}


@torch.no_grad()
def cast_by_layer(this: PoolRank) -> list[bool]:
    """diffusers' layerwise casting gives parameters other memory at every call."""
    network, call = _built("FluxTransformer2DModel")
    network.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    wanted = network(**call)
    weights = divided(this, network)
    found = [equal(network(**call), wanted) for _ in range(2)]
    weights.restore()
    return [*found, equal(network(**call), wanted)]


@torch.no_grad()
def by_one_operation(this: PoolRank) -> list[bool]:
    """Gathered by an operation of torch.distributed, as on GPUs, instead of by messages."""
    network, x = networks.build("tied"), networks.sample()
    wanted = network(x)
    comm, transport = over_torch(this, collective=True)
    assert transport.collectives is not None
    axis = this.mesh(patch=this.world)["patch"]
    transport.collectives.form(rank_sets(range(this.world), patch=this.world))
    weights = joined(network, comm, axis)
    found = [equal(network(x), wanted) for _ in range(3)]
    weights.restore()
    transport.close()
    return [*found, equal(network(x), wanted)]


@torch.no_grad()
def compiled_blocks(this: PoolRank, kind: str = "sharded") -> dict[str, Any]:
    """Calls of a network of compiled blocks, and how many graphs were made for them; afterwards without graphs."""
    from torch._dynamo.utils import counters  # takes seconds

    network, x = networks.build("tied"), networks.sample()
    for block in network.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager", fullgraph=True)
    graphs = [block._compiled_call_impl for block in network.blocks]  # type: ignore[union-attr]
    torch._dynamo.reset()
    counters.clear()
    wanted = network(x)
    made = counters["stats"]["unique_graphs"]
    weights = divided(this, network, kind)
    found = [equal(network(x), wanted) for _ in range(2)]
    with uncompiled(network):
        keep_what_is_read_outside(weights, lambda: network(x))
        found.append(equal(network(x), wanted))
    more = counters["stats"]["unique_graphs"] - made
    weights.restore()
    found.append(equal(network(x), wanted))
    restored = [block._compiled_call_impl for block in network.blocks] == graphs  # type: ignore[union-attr]
    return {"equal": found, "made": made, "more": more, "restored": restored}


@torch.no_grad()
def after_an_exception(this: PoolRank) -> list[bool]:
    """A block raises on every rank; the next call is right."""
    network, x = networks.build("chain"), networks.sample()
    wanted = network(x)
    weights = divided(this, network)
    network(x)
    handle = network.blocks[2].linear.register_forward_hook(_fail)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        network(x)
    handle.remove()
    found = [equal(network(x), wanted) for _ in range(2)]
    weights.restore()
    return found


@torch.no_grad()
def gathers_after_an_exception(this: PoolRank) -> list[int]:
    """How many blocks a call brings into slots: one like any other, and the one after a call that has failed."""
    network, x, found = networks.build("chain"), networks.sample(), []
    weights = divided(this, network)
    for fails in (False, False, True):
        if fails:
            handle = network.blocks[3].linear.register_forward_hook(_fail)  # type: ignore[index]
            with pytest.raises(ZeroDivisionError):
                network(x)
            handle.remove()
        weights.settle()
        weights.comm.traffic.clear()
        network(x)
        found.append(weights.comm.traffic.rounds["weights"])
    weights.restore()
    return found[1:]


def of_inference_mode(this: PoolRank) -> list[bool]:
    """Of each weight, whether autograd refuses it after calls, and the end, in torch's inference mode."""
    network, x = networks.build("read outside"), networks.sample()
    weights = divided(this, network, "hosted")
    with torch.inference_mode():
        keep_what_is_read_outside(weights, lambda: network(x))
        network(x)
        weights.restore()
    return [weight.is_inference() for weight in network.parameters()]


def slots_after_the_end(this: PoolRank) -> bool:
    """Whether the memory of slots is free again, though the object is still held."""
    weights = divided(this, networks.build("chain"), "hosted")
    slots = [StorageWeakRef(slot.untyped_storage()) for slot in weights._slots]
    weights.restore()
    return all(slot.expired() for slot in slots)


@torch.no_grad()
def refused(this: PoolRank, change: str, kind: str = "sharded") -> str:
    """The message for a network that cannot be sharded."""
    network: Any = networks.build("chain")
    CHANGES[change](this, network)
    try:
        divided(this, network, kind)
    except PatchparError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _compile(this: PoolRank, network: Any) -> None:
    network.compile()


def _to_meta(this: PoolRank, network: Any) -> None:
    network.blocks[1].to("meta")


def _without_blocks(this: PoolRank, network: Any) -> None:
    del network.blocks


def _hide(this: PoolRank, network: Any) -> None:
    network.blocks = nn.ModuleList(quantised.HiddenWeights() for _ in range(5))


def _different(this: PoolRank, network: Any) -> None:
    if this.rank:
        network.blocks[3].shift = nn.Parameter(torch.zeros(7))


CHANGES: dict[str, Callable[[PoolRank, Any], None]] = {
    "nothing": lambda this, network: None,
    "compiled": _compile,
    "offloaded": _to_meta,
    "no blocks": _without_blocks,
    "hidden": _hide,
    "different": _different,
}


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    if name in TRANSFORMERS:
        return TRANSFORMERS[name].build(), TRANSFORMERS[name].call(0)
    return denoisers.build(name), denoisers.call(name, 12, 8)


@torch.no_grad()
def weights_in_files(this: PoolRank, folder: str, in_memory: tuple[int, ...], kind: str) -> dict[str, Any]:
    """A network whose weights are pages of a file, but for those of the ranks `in_memory`."""
    network, x = networks.build("chain"), networks.sample()
    file = str(Path(folder) / f"{this.rank}.safetensors")
    save_file({name: each.contiguous() for name, each in network.state_dict().items()}, file)
    network.load_state_dict(load_file(file), assign=True)
    if this.rank in in_memory:
        network.load_state_dict({name: each.clone() for name, each in network.state_dict().items()}, assign=True)
    before, wanted = state_of(network), network(x)
    addresses = [each.data_ptr() for each in network.blocks.parameters()]

    def lie_in_file() -> bool:
        return addresses == [each.data_ptr() for each in network.blocks.parameters()]

    weights = divided(this, network, kind)
    outputs = [equal(network(x), wanted) for _ in range(2)]
    found = {"in file": lie_in_file(), "held": weights.store.num_bytes, "sent": dict(weights.comm.traffic.bytes_sent)}
    network.blocks[0].shift.add_(1.0)  # by this rank, which the others do not see
    weights.restore()
    is_changed = not equal(network.blocks[0].shift, before["blocks.0.shift"][0])
    network.blocks[0].shift.copy_(before["blocks.0.shift"][0])
    return {
        **found,
        "equal": outputs,
        "restored": same_state(network, before),
        "after": lie_in_file(),
        "changed": is_changed,
    }
