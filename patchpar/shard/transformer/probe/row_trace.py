"""Find which row of an input each row of a result depends on, by perturbing rows and recording what changes.

Rows are perturbed in groups, twice for each bit of their number: those that have the bit, then those that have not.

    row 5 of 8 = 101        changes with bit 2, without bit 1, with bit 0: together its number
    a mean of rows          changes both with and without: it has several sources
    a constant              never changes

So 2 log2(n) runs find the source of every row at once, even where dims have equal lengths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel

UNMOVED, MIXED = -1, -2
TOLERANCE = 1e-4  # of the largest value: a smaller change is rounding, as in a product over another number of rows

Observed = Mapping[str, Tensor]
Observe = Callable[[Tensor], Observed]
Hits = tuple[list[Tensor], list[Tensor]]  # for each dim, which indices moved with a bit, and which without it


@dataclass(frozen=True, slots=True)
class RowSources:
    """For each dim of an observed tensor the source of each index: the number of a row, UNMOVED or MIXED."""

    by_dim: tuple[Tensor, ...]

    def named(self, dim: int) -> bool:
        """Whether some indices of `dim` have one row as their source."""
        return bool((self.by_dim[dim] >= 0).any())

    def mixed(self, dim: int) -> bool:
        """Whether some indices of `dim` have several."""
        return bool((self.by_dim[dim] == MIXED).any())

    @property
    def moved(self) -> bool:
        """Whether anything has changed."""
        return bool((self.by_dim[0] != UNMOVED).any()) if self.by_dim else False

    def row_dims(self) -> list[int]:
        """Dims along which every index has at most one row as its source, and some have one."""
        return [dim for dim in range(len(self.by_dim)) if self.named(dim) and not self.mixed(dim)]


def trace_rows(observe: Observe, x: Tensor, dim: int, base: Observed | None = None) -> dict[str, RowSources]:
    """Return the sources of each tensor of `observe(x)` among the rows of x, of any shape, along `dim`.

    Empty if no index has a single row as its source. `base`: `observe(x)` without perturbation, if known. Raises
    UnsupportedModel where the observed shapes depend on values.
    """
    x = x.contiguous()  # as the perturbed copies are: another memory layout rounds differently
    base, size = observe(x) if base is None else base, x.shape[dim]
    hits: dict[str, list[Hits]] = {name: [] for name in base}
    numbers = torch.arange(size)
    for bit in reversed(range((size - 1).bit_length())):
        has_bit = (numbers >> bit & 1).bool()
        one, other = (_moved(base, observe(disturbed(x, dim, numbers[group]))) for group in (has_bit, ~has_bit))
        for name, found in hits.items():
            found.append((one[name], other[name]))
        if bit == (size - 1).bit_length() - 1 and not _any_named(hits):
            return {}
    return {name: _decoded(found) for name, found in hits.items()}


def _moved(base: Observed, now: Observed) -> dict[str, list[Tensor]]:
    """Return which indices of each observed tensor have changed. Raises UnsupportedModel."""
    for name, before in base.items():
        if name not in now or now[name].shape != before.shape:
            raise UnsupportedModel(f"the shape of {name} depends on values, so its rows cannot be traced")
    return {name: moved_indices(before, now[name]) for name, before in base.items()}


def disturbed(x: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return a copy of x, of any shape, with clearly different rows `indices` [n] along `dim`. Deterministic."""
    indices = indices.to(x.device)
    rows = x.index_select(dim, indices)
    return x.index_copy(dim, indices, _other(rows, x))


def _other(x: Tensor, amid: Tensor) -> Tensor:
    """Return other values for x, some rows of `amid`."""
    if not x.numel():
        return x
    if x.dtype == torch.bool:
        return ~x
    if not (x.is_floating_point() or x.is_complex()):
        least, most = amid.min(), amid.max()  # it may be an index, and must stay in its range
        return torch.where((x < most) | (least == most), x + 1, least)
    generator = torch.Generator().manual_seed(x.numel())
    noise = torch.randn(x.shape, generator=generator, dtype=torch.complex64 if x.is_complex() else torch.float32)
    return (x.nan_to_num(0.0, 0.0, 0.0) + (1 + x.nan_to_num(0.0, 0.0, 0.0).abs()) * noise.to(x.device)).to(x.dtype)


def moved_indices(before: Tensor, after: Tensor) -> list[Tensor]:
    """Return for each dim which indices differ by more than rounding, bool [size], of tensors of the same shape."""
    if before.is_floating_point() or before.is_complex():
        finite = before.abs().nan_to_num(0.0, 0.0, 0.0)
        floor = TOLERANCE * finite.amax() if finite.numel() else 0.0
        differs = ~((after - before).abs() <= floor) & (after != before) & ~(after.isnan() & before.isnan())
    else:
        differs = after != before
    dims = range(before.ndim)
    return [differs.any(tuple(d for d in dims if d != dim)) if before.ndim > 1 else differs for dim in dims]


def _any_named(hits: Mapping[str, Sequence[Hits]]) -> bool:
    return any((one ^ other).any() for found in hits.values() for one, other in zip(*found[0], strict=True))


def _decoded(found: Sequence[Hits]) -> RowSources:
    """Decode the sources: an index that changed with exactly one group of every bit has that number."""
    by_dim = []
    for dim in range(len(found[0][0])):
        with_bit, without = (torch.stack([pair[rail][dim] for pair in found]).cpu() for rail in (0, 1))
        weights = 2 ** torch.arange(len(found) - 1, -1, -1).unsqueeze(-1)
        number = (with_bit * weights).sum(0)
        number[~(with_bit ^ without).all(0)] = MIXED
        number[~(with_bit | without).any(0)] = UNMOVED
        by_dim.append(number)
    return RowSources(tuple(by_dim))
