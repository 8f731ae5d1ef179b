"""Tensors of several dtypes and strides in one flat buffer: what a rank sends in one exchange, written at once.

`pieces` names in turns a tensor, by its number, and the element of the buffer where it begins, in ascending order. A
tensor may be there several times. Elements of the buffer between pieces have no values.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op, is_fused, nothing
from patchpar.comm.kernels.program import ALIGNMENT, Program

MOST_TENSORS = 4  # that the kernel has pointers for
BLOCK = 1024  # elements that a program copies
Layout = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides of a tensor."""
Numbers = tuple[tuple[int, ...], ...]


def pack_tensors(buffer: Tensor, tensors: Sequence[Tensor], pieces: Sequence[int]) -> None:
    """Write `tensors`, of any shape, to `buffer` [elements]: on a GPU by one launch, if a few are strided.

    Contiguous ones are a single launch of torch's, whatever their number. `pieces`: see above.
    """
    if is_fused(buffer) and len(tensors) <= MOST_TENSORS:
        for x in tensors:
            if not x.is_contiguous():
                write_pieces.fused(buffer, tensors, pieces)
                return
    write_pieces_eager(buffer, tensors, pieces)


def copies_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return contiguous copies of `tensors`, of any shape: by one launch where they are alike."""
    if len(tensors) > 1 and len({(x.shape, x.dtype) for x in tensors}) == 1:
        return torch.stack(tuple(tensors)).unbind()
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def write_pieces_eager(buffer: Tensor, tensors: Sequence[Tensor], pieces: Sequence[int]) -> None:
    """Write `tensors`, of any shape, to `buffer` [elements]."""
    flat = _flat(tensors, buffer.dtype)
    parts, end = list[Tensor](), 0
    for number, start in zip(pieces[::2], pieces[1::2], strict=True):
        if start > end:
            parts.append(buffer.new_empty(start - end))
        parts.append(flat[number])
        end = start + flat[number].shape[0]
    if end < buffer.shape[0]:
        parts.append(buffer.new_empty(buffer.shape[0] - end))
    torch.cat(parts, out=buffer)


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the elements of each tensor, of any shape, as [elements] of `dtype`."""
    found = [x.detach() if x.requires_grad else x for x in tensors]
    strided = [number for number, x in enumerate(found) if not x.is_contiguous()]
    for number, copy in zip(strided, copies_of([found[number] for number in strided]), strict=True):
        found[number] = copy
    flat = [x if x.ndim == 1 else x.view(-1) for x in found]
    return [x if x.dtype == dtype else x.view(dtype) for x in flat]


_WRITE_PIECES = Program("patchpar.comm.kernels.programs.write_pieces", "write_pieces_program")


def launch_write_pieces(buffer: Tensor, tensors: Sequence[Tensor], pieces: Sequence[int]) -> None:
    """Launch the kernel for at most MOST_TENSORS, of any shape: programs for each piece of `buffer` [elements]."""
    sources = tuple(tensors)
    facts: list[object] = [tuple(pieces), buffer.dtype, buffer.data_ptr() % ALIGNMENT, buffer.get_device()]
    for x in sources:  # a comprehension were a call more
        facts += (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)
    key = tuple(facts)
    if not _WRITE_PIECES.launched_again(key, buffer, sources):
        grid, numbers, constants = _prepared(tuple(pieces), [(x.shape, x.stride()) for x in sources])
        _WRITE_PIECES.launch_for(key, numbers, grid, buffer, sources, **constants)


def _prepared(pieces: tuple[int, ...], layouts: Sequence[Layout]) -> tuple[tuple[int, int], Numbers, dict[str, int]]:
    """Return the grid of the program, what it reads of pieces and tensors, and its constants.

    No table in the device's memory has these numbers: a captured graph would have to keep it.
    """
    dims = max(1, *(len(shape) for shape, _ in layouts))
    counts = tuple([prod(shape) for shape, _ in layouts])
    sizes, strides = list[int](), list[int]()
    for shape, steps in layouts:
        missing = dims - len(shape)
        sizes += (*(max(1, size) for size in reversed(shape)), *[1] * missing)
        strides += (*reversed(steps), *[0] * missing)
    grid = max(1, -(-max(counts) // BLOCK)), len(pieces) // 2  # CUDA has 65,535 programs in the second dim
    constants = {"PIECES": grid[1], "COUNT": len(layouts), "DIMS": dims, "BLOCK": BLOCK, "num_warps": 8}
    numbers = pieces[::2], pieces[1::2], counts, tuple(sizes), tuple(strides)
    return grid, numbers, constants


write_pieces = fused_op(
    "write_pieces(Tensor(a!) buffer, Tensor[] tensors, int[] pieces) -> ()",
    eager=write_pieces_eager,
    launch=launch_write_pieces,
    fake=nothing,
)
