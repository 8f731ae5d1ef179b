"""Bands: the rows (or columns) of a latent that each rank owns. Pure functions, no torch.

A UNet halves its maps several times, so a band starts at a multiple of the total stride; otherwise a strided
convolution would straddle two ranks. 40 rows, total stride 8, 3 ranks:

    units of 8 rows   0  1 | 2  3 | 4
    rows              0-15 | 16-31| 32-39
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Bands:
    """`starts[i]:starts[i + 1]` are the rows of group rank i, in latent rows of the denoiser's input."""

    starts: tuple[int, ...]

    @property
    def total(self) -> int:
        """Number of all rows."""
        return self.starts[-1]

    def size(self, group_rank: int) -> int:
        """Return the number of rows of one rank."""
        return self.starts[group_rank + 1] - self.starts[group_rank]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def at_level(self, group_rank: int, own_rows: int, whole: int) -> "Bands":
        """Return the bands on a map, halved (rounding up) or enlarged, with `own_rows` of `whole` rows here.

        Raises ValueError for a map that is neither.
        """
        found = _at_level(self.starts, group_rank, own_rows)
        if found is None:
            own = self.size(group_rank)
            raise ValueError(
                f"a map with {own_rows} rows of this rank does not belong to a band of {own} of {whole} rows"
            )
        return found


@lru_cache(maxsize=1024)  # every layer asks, in every call
def _at_level(starts: tuple[int, ...], group_rank: int, own_rows: int) -> Bands | None:
    own = starts[group_rank + 1] - starts[group_rank]
    if own_rows >= own and own_rows % own == 0:
        return Bands(tuple(start * (own_rows // own) for start in starts))
    stride = 2
    while stride <= own:
        if -(-own // stride) == own_rows:
            return Bands(tuple(-(-start // stride) for start in starts))
        stride *= 2
    return None


def starts_of(units: int, group_ranks: int, ratio: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return where the units of each rank start, and their end: as evenly as can be, or by a `ratio`.

    Each rank has one at least, if there are as many. The rank that takes longest, its units over its part of the ratio,
    takes as little as it can: rounding to the nearest numbers can give a slow rank one more, for which all wait.
    """
    if not ratio or units < group_ranks:
        each, more = divmod(units, group_ranks)
        return tuple(each * before + min(before, more) for before in range(group_ranks + 1))
    certain = [int(units * part / sum(ratio)) - group_ranks for part in ratio]  # what each has in any case
    sizes = [max(1, size) for size in certain]
    while sum(sizes) < units:
        after_one_more = [(size + 1) / part for size, part in zip(sizes, ratio, strict=True)]
        sizes[after_one_more.index(min(after_one_more))] += 1
    return tuple(accumulate(sizes, initial=0))


def split_bands(total: int, group_ranks: int, unit: int, ratio: tuple[int, ...] = ()) -> Bands:
    """Split rows into bands of multiples of `unit`, the remainder in the last. Raises ValueError for too many ranks."""
    units = total // unit
    if group_ranks > units:
        raise ValueError(
            f"{total} latent rows make {units} band{'s' * (units != 1)} of {unit} rows, too few for {group_ranks} ranks"
        )
    starts = starts_of(units, group_ranks, ratio)
    return Bands((*(start * unit for start in starts[:-1]), total))


@dataclass(frozen=True, slots=True)
class Stencil:
    """A convolution along the split dim: kernel extent (dilated), stride, zero rows padded before."""

    extent: int
    stride: int
    padding: int

    @property
    def before(self) -> int:
        """Rows of the previous band that our first output reads."""
        return self.padding

    @property
    def after(self) -> int:
        """Rows of the next band that our last output reads; bands start at multiples of the stride."""
        return max(0, self.extent - self.stride - self.padding)

    def outputs_before(self) -> int:
        """Return how many of our first outputs read the previous band."""
        return -(-self.padding // self.stride)

    def outputs_after(self) -> int:
        """Return how many of our last outputs read the next band."""
        return -(-self.after // self.stride)
