"""A network's blocks, and the weights of each as one run of bytes, whatever their dtypes and tensor subclasses.

    block       an item of an outermost ModuleList: blocks run one after the other, and each is called as a module
    packed      parameters and buffers of a block, each at an aligned offset, in its own strides
    left out    tensors outside blocks; tensors whose memory overlaps that of another block or of the rest (tied);
                what is in `left_whole`

A quantised parameter is packed as the plain tensors in it (`__tensor_flatten__`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.errors import UnsupportedModel
from patchpar.launch.file_pages import FilePages
from patchpar.shard.group_offload import is_offloaded
from patchpar.shard.module_tree import modules_of
from patchpar.shard.verification import is_alike
from patchpar.shard.weights.left_whole import (
    adapter_modules,
    blocks_outside_graphs,
    holds_others,
    is_plain,
    opaque_weights,
)
from patchpar.shard.weights.memory_ranges import overlapping, range_of, span_of
from patchpar.shard.weights.offsets import offsets_in_parts, part_bytes

LEAST = 1000  # blocks with less than this part of a network's bytes are not worth a gather
OUTSIDE = -1
HOST = torch.device("cpu")
NAN_BYTE = 0xFF  # a NaN in every floating-point dtype of torch, when all bytes have this value
CopyMemory = Callable[[Tensor, int, int, Tensor], object]
"""Copies the bytes from the first to before the last of a tensor of any shape, with what lies between its elements."""


def memory_of(x: Tensor, first: int, last: int) -> Tensor:
    """Return bytes of the memory of `x`, of any shape, as [last - first], with what lies between its elements."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().as_subclass(Tensor).as_strided((span_of(x),), (1,)).view(torch.uint8)[first:last]


def copy_memory(x: Tensor, first: int, last: int, into: Tensor) -> None:
    """Copy bytes of the memory of `x`, of any shape, to `into` [last - first]."""
    into.copy_(memory_of(x, first, last))


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A plain tensor of any shape in the bytes of its block, from `offset`, with the strides that it had."""

    tensor: Tensor
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    num_bytes: int

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor as it lies in `buffer` [bytes], which begins as the block does."""
        elements = buffer.narrow(0, self.offset, self.num_bytes).view(self.dtype)
        return elements.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlock:
    """The weights of one block. `num_bytes`: of all of them, with what aligns each."""

    name: str
    module: nn.Module
    tensors: tuple[PackedTensor, ...]
    num_bytes: int

    def shard_bytes(self, num_ranks: int) -> int:
        """Return the bytes that each of `num_ranks` ranks keeps; the last ones may hold padding only."""
        return part_bytes(self.num_bytes, num_ranks)

    def write(self, buffer: Tensor, first: int = 0, copy: CopyMemory = copy_memory) -> None:
        """Copy the weights into `buffer` [bytes], from byte `first` of the block on; others are not read."""
        last = first + buffer.numel()
        for each in {each.offset: each for each in self.tensors}.values():  # tied ones once
            begin, end = max(first, each.offset), min(last, each.offset + each.num_bytes)
            if begin < end:
                copy(each.tensor, begin - each.offset, end - each.offset, buffer[begin - first : end - first])

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors, of any shape, as they lie in `buffer` [bytes]."""
        return [each.view(buffer) for each in self.tensors]

    def tensors_now(self) -> list[Tensor]:
        """Return tensors, of any shape, in the memory that the parameters and buffers use now."""
        with torch.inference_mode(mode=False):
            return [each.tensor.detach() for each in self.tensors]

    def is_in(self, pages: FilePages) -> bool:
        """Whether all the weights are in files that this process has mapped."""
        return all(pages.have(each.tensor.data_ptr(), each.num_bytes) for each in self.tensors)

    def fillers(self, buffer: Tensor) -> list[Tensor]:
        """Return tensors like the block's, of any shape, that all lie at the beginning of `buffer` [bytes]."""
        return [replace(each, offset=0).view(buffer) for each in self.tensors]

    def nan_views(self) -> list[Tensor]:
        """Return tensors like the block's, of any shape, all of whose elements lie in one: NaN, or all bits set."""
        with torch.inference_mode(mode=False):
            return [_nan_view(each) for each in self.tensors]

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(each.num_bytes for each in self.tensors)

    def own_copies(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return `views` of the block, of any shape, in memory of their own; tied ones share it as before."""
        copies: dict[int, Tensor] = {}
        with torch.inference_mode(mode=False):  # whose tensors autograd refuses for good
            for each, view in zip(self.tensors, views, strict=True):
                if each.offset not in copies:
                    copies[each.offset] = memory_of(view, 0, each.num_bytes).clone()
            return [copies[x.offset].view(x.dtype).as_strided(x.shape, x.stride) for x in self.tensors]

    def point_to(self, tensors: Sequence[Tensor]) -> None:
        """Make the parameters and buffers use the memory of `tensors`, of any shape, each that of its own."""
        for each, found in zip(self.tensors, tensors, strict=True):
            if found.is_meta or each.tensor.data_ptr() != found.data_ptr() or each.tensor.dtype != found.dtype:
                each.tensor.data = found

    def is_replaced(self) -> bool:
        """Return whether one of the tensors is no longer that of a parameter or buffer of the block."""
        found = {id(x) for module in modules_of(self.module) for x in _own_tensors(module)}
        return any(id(each.tensor) not in found for each in self.tensors)

    def layout(self) -> str:
        """Return what must be the same on all ranks."""
        return f"{self.name} " + " ".join(f"{x.offset} {x.dtype} {x.shape} {x.stride}" for x in self.tensors)


def packed_blocks(
    network: nn.Module, device: torch.device, *, on_the_host: bool = False, ranks: int = 1
) -> list[PackedBlock]:
    """Return the blocks of a network, in the order they are registered in, with the weights that can be packed.

    Not those in the graphs of compiled modules. `on_the_host`: whether weights may still be in host memory. `ranks`:
    how many have a part of each. Raises UnsupportedModel for a network without others, and with weights elsewhere.
    """
    blocks, kind = blocks_outside_graphs(network, blocks_of(network)), type(network).__name__
    allowed = [device, HOST] if on_the_host else [device]
    owners = list(_tensors_of(network, blocks))
    elsewhere = next((x.device for _, x in owners if not _is_on(x.device, allowed)), None)
    if elsewhere is not None or _is_offloaded(network):
        where = "hooks that move its weights" if elsewhere is None else f"weights on {elsewhere}"
        raise UnsupportedModel(
            f"{kind} has {where}, but this rank is on {device}: weights=sharded and weights=hosted take the place of "
            "offloading; load the model without it, or use weights=whole"
        )
    found = _packed(owners, blocks, ranks)
    total = sum(block.num_bytes for block in found)
    found = [block for block in found if block.num_bytes * LEAST >= total]
    if not found and (opaque := opaque_weights(blocks.values())):
        raise UnsupportedModel(
            f"the blocks of {kind} have no weights that are plain tensors in memory, but {opaque}: use weights=whole, "
            "or a quantisation whose weights are tensors or can be flattened into some, as that of torchao"
        )
    if not found:
        raise UnsupportedModel(
            f"{kind} has no list of blocks with weights of their own (nn.ModuleList), so that none can be sharded: "
            "use weights=whole"
        )
    return found


def refuse_other_layouts(network: nn.Module, blocks: Sequence[PackedBlock], mesh: AxisComm) -> None:
    """Raise UnsupportedModel unless all ranks of the axis have packed the same blocks. Collective."""
    text = "\n".join(block.layout() for block in blocks)
    if not is_alike(mesh, "layout of weights", text):  # all ranks see it
        raise UnsupportedModel(
            f"the ranks hold different weights of {type(network).__name__} (names, shapes or dtypes of its blocks; "
            f"here {len(blocks)} of them): load the same model on all of them"
        )


def resident_of(num_blocks: int, count: int) -> set[int]:
    """Return which of the blocks stay whole: `count` of them, or all, evenly spaced."""
    count = min(count, num_blocks)
    return {(2 * number + 1) * num_blocks // (2 * count) for number in range(count)}


def _is_on(found: torch.device, devices: Sequence[torch.device]) -> bool:
    return any(found.type == device.type and device.index in (None, found.index) for device in devices)


def _is_offloaded(network: nn.Module) -> bool:
    """Whether hooks of accelerate or diffusers move the weights between devices; they may be in host memory now."""
    return any("_hf_hook" in vars(module) or is_offloaded(module) for module in modules_of(network))


def blocks_of(network: nn.Module) -> dict[str, nn.Module]:
    """Return the items of the outermost lists by path, each once."""
    found: dict[str, nn.Module] = {}
    for path, blocks in _outermost_lists(network, "", set()):
        found |= {f"{path}{name}": item for name, item in blocks.named_children()}
    return found


def _outermost_lists(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield lists with what the paths of their items begin with. `seen`: modules that are not looked into."""
    if isinstance(module, nn.ModuleList):
        seen.update(modules_of(module))
        yield path, module
        return
    seen.add(module)
    for name, child in module.named_children():
        if child not in seen:
            yield from _outermost_lists(child, f"{path}{name}.", seen)


def _tensors_of(network: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[tuple[int, Tensor]]:
    """Yield each plain tensor of any shape once for each block that has it; the rest belongs to OUTSIDE."""
    inside, adapters = set[nn.Module](), adapter_modules(network)
    for number, block in enumerate(blocks.values()):
        seen: set[int] = set()
        for module in modules_of(block):
            inside.add(module)
            for x in () if module in adapters else _own_tensors(module):
                if id(x) not in seen:
                    seen.add(id(x))
                    yield number, x
    for module in modules_of(network):
        if module not in inside:
            yield from ((OUTSIDE, x) for x in _own_tensors(module))


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for x in (*module._parameters.values(), *module._buffers.values()):
        if x is not None:
            yield from (plain for plain in plain_tensors(x) if plain.numel() and is_plain(plain))


def plain_tensors(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the bytes of `x`, of any shape: itself, or those inside a tensor subclass."""
    if holds_others(x):
        names, _ = cast(Any, x).__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(x, name))
    else:
        yield x


def _packed(owners: list[tuple[int, Tensor]], blocks: dict[str, nn.Module], ranks: int) -> list[PackedBlock]:
    left_out, ranges = set[int](), [range_of(x) for _, x in owners]
    for group in overlapping(ranges):
        if len(group) > 1 and len({(owners[number][0], ranges[number]) for number in group}) > 1:
            left_out |= set(group)
    by_block: dict[int, dict[Tensor, tuple[int, int]]] = defaultdict(dict)
    for number, (owner, x) in enumerate(owners):
        if number not in left_out and owner != OUTSIDE:
            by_block[owner][x] = ranges[number]
    names = list(blocks)
    return [_pack(names[owner], blocks[names[owner]], found, ranks) for owner, found in sorted(by_block.items())]


def _pack(name: str, module: nn.Module, ranges: dict[Tensor, tuple[int, int]], ranks: int) -> PackedBlock:
    sizes = {memory: memory[1] - memory[0] for memory in ranges.values()}  # of tied ones once
    offsets = dict(zip(sizes, offsets_in_parts([*sizes.values()], ranks), strict=True))
    packed = [
        PackedTensor(x, offsets[memory], x.dtype, tuple(x.shape), x.stride(), sizes[memory])
        for x, memory in ranges.items()
    ]
    return PackedBlock(name, module, tuple(packed), max(offset + sizes[memory] for memory, offset in offsets.items()))


def _nan_view(packed: PackedTensor) -> Tensor:
    element = torch.full((packed.dtype.itemsize,), NAN_BYTE, dtype=torch.uint8, device=packed.tensor.device)
    return element.view(packed.dtype).as_strided(packed.shape, (0,) * len(packed.shape))
