"""Where tensors lie in memory, and which of them overlap: tied weights, and views of one tensor."""

from collections.abc import Iterator, Sequence

from torch import Tensor

APART = 2**48  # bytes between made-up addresses


def overlapping(ranges: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the indices of ranges of memory that overlap, of all of them, in groups."""
    group: list[int] = []
    end = 0
    for (first, last), number in sorted(zip(ranges, range(len(ranges)), strict=True)):
        if group and first >= end:
            yield group
            group, end = [], 0
        group.append(number)
        end = max(end, last)
    if group:
        yield group


def span_of(x: Tensor) -> int:
    """Return the number of elements from the first to the last of `x`, of any shape, in memory."""
    if x.is_contiguous():
        return x.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def range_of(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of `x`, of any shape, and of the first one after it."""
    first = x.data_ptr() if not x.is_meta else _made_up_address(x)
    return first, first + span_of(x) * x.element_size()


def _made_up_address(x: Tensor) -> int:
    """Return where a tensor of any shape without memory would begin if storages were far apart."""
    return x.untyped_storage()._cdata * APART + x.storage_offset() * x.element_size()
