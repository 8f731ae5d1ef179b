"""This rank's part of the current denoiser call: its band at every level, its edge rows, and its stale values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from diffusers.hooks import ModelHook
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.exchange_part import ExchangePart, edges_part
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.bands import Bands
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.kv_selection import TokensAcross
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.attention_memory import AttentionMemory
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.stale.cache import StaleCache
from patchpar.shard.stale.guidance_call import StaleEntry
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.unet.layers import RawHalo

THIS_STEP = ("fresh", "separate")  # timings without stale values; None is another


@dataclass(slots=True)
class LocalPatch:
    """This rank's part of the current denoiser call. `comm`, `axis` and `policy` are fixed, the rest is set per call.

    `dim` is -2 for bands of rows, -1 for bands of columns. `whole`: the whole latent [B, C, H, W] or [B, C, F, H, W].
    While not `active` every hook runs the plain layer. A `fresh` call uses no stale values; without a `cache` it stores
    none either. `frozen`: stored values are never updated and nothing is sent, a negative control. `step_ratio`: length
    of this step in units of the last, a scalar in fp32. `kv_sizes`: keys
    of every exchange point with attention, in tokens times channels of any unit. `attend`: exact attention between
    ranks, see `attend_together`. `memory`: for what it exchanges, if layers may use the same buffers.
    """

    comm: Communicator
    axis: Axis
    policy: ExchangePolicy = field(default_factory=ExchangePolicy)
    bands: Bands = field(default_factory=lambda: Bands((0,)))
    dim: int = -2
    whole: Tensor | None = None
    active: bool = True
    fresh: bool = True
    frozen: bool = False
    kv_sizes: Mapping[str, float] = field(default_factory=dict)
    step_ratio: Tensor = field(default_factory=lambda: torch.ones(()))
    cache: StaleCache | None = None
    attend: Callable[..., Tensor] = attend_together
    memory: AttentionMemory | None = None
    halos: dict[str, RawHalo] = field(default_factory=dict)  # stored by a norm for the convolution it feeds

    @property
    def group_rank(self) -> int:
        """Index of this rank on the axis, and of its band."""
        return self.axis.rank

    @property
    def fuses_edges(self) -> bool:
        """Whether a norm's exchange includes the edge rows of the convolution it feeds."""
        return self.fresh or (self.policy.halo == "fresh" and self.policy.moments == "fresh")

    def entry(self, where: str, timing: object) -> StaleEntry | None:
        """Return the stale values of the exchange point `where`; None for one with fresh values only.

        Raises UnsupportedModel where it has none of this image yet.
        """
        if self.cache is None or timing is None or (type(timing) is str and timing in THIS_STEP):
            return None  # options of a context are compared with nothing, in every attention
        found = self.cache.entry(where)
        if found.is_first and not self.fresh:
            raise without_values(where)
        return found

    def layers_like(self, where: str) -> float:
        """Return how many attention layers as large as that of the exchange point `where` all of a call's are."""
        sizes = self.kv_sizes
        return sum(sizes.values()) / sizes.get(where, max(sizes.values())) if sizes else 1.0

    def level(self, own_rows: int) -> Bands:
        """Return the bands of a map of which this rank has `own_rows`. Raises UnsupportedModel."""
        try:
            return self.bands.at_level(self.group_rank, own_rows, self.bands.total)
        except ValueError as error:
            raise _not_of_a_band(error) from error

    def whole_map(self, kind: str, where: str, own: Tensor) -> Tensor:
        """All-gather a whole map [B, C, ..., H, W] from each rank's fresh band `own` [B, C, ..., h, W].

        `kind`: name under which its bytes are counted. Raises UnsupportedModel, ExchangeError.
        """
        bands = self.level(own.shape[self.dim])
        sizes = [bands.size(group_rank) for group_rank in range(self.axis.size)]
        parts = AllGather(self.comm, self.axis, kind, where).parts(own.contiguous(), self.dim, sizes)
        return torch.cat(parts, self.dim)

    def edges(self, x: Tensor, before: int, after: int) -> ExchangePart:
        """Return the exchange of edge rows of the band `x` [B, C, ..., h, W] with the ranks before and after.

        A layer reads `before` and `after` rows beyond its band. Raises PlanError, UnsupportedModel.
        """
        shape, dtype, dim, axis = x.shape, x.dtype, self.dim, self.axis
        if before > 1 or after > 1:  # every band has a row
            self._refuse_thin(shape[dim], max(before, after))
        up, down = axis.rank > 0, axis.rank + 2 < len(self.bands.starts)  # as `rows_sent`, in every convolution
        first = x.narrow(dim, 0, after) if up and after else None
        last = x.narrow(dim, shape[dim] - before, before) if down and before else None
        above = _rows_spec(shape, dtype, dim, before) if up else None
        return edges_part(axis, first, last, above, _rows_spec(shape, dtype, dim, after) if down else None)

    def rows_sent(self, before: int, after: int) -> tuple[int, int]:
        """Return how many of this rank's first and last rows others read, in a layer as of `edges`."""
        return after if self.axis.rank > 0 else 0, before if self.axis.rank + 2 < len(self.bands.starts) else 0

    def _refuse_thin(self, own_rows: int, reach: int) -> None:
        """Check all bands on all ranks, so that all raise together."""
        bands = self.level(own_rows)
        thinnest = min(bands.size(group_rank) for group_rank in range(len(bands)))
        if reach > thinnest:
            raise PlanError(
                f"a convolution reads {reach} rows of its neighbours, but a band has only {thinnest} there: use fewer "
                f"than {len(bands)} ranks on axis 'patch', or a larger image"
            )

    def grid(self, own_tokens: int) -> LevelGrid:
        """Return the tokens of all ranks on the level where this rank has `own_tokens`. Raises UnsupportedModel."""
        assert self.whole is not None
        across = self.whole.shape[-1 if self.dim == -2 else -2]
        try:
            found = _grid_of(self.bands.starts, self.axis.rank, self.dim, across, own_tokens)
        except ValueError as error:
            raise _not_of_a_band(error) from error
        if found is None:
            raise UnsupportedModel(
                f"{own_tokens} tokens of this rank fit no level of a band of {self.bands.size(self.group_rank)} rows, "
                f"{across} across: this attention cannot be split, use plan cfg=2 or data=N"
            )
        return found


class PatchHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Replaces a module's forward by `new_forward`, for this rank's patch. `where`: its exchange point, if any."""

    def __init__(self, patch: LocalPatch, where: str = "") -> None:
        super().__init__()
        self.patch, self.where = patch, where


def without_values(where: str) -> UnsupportedModel:
    """Return the error for an exchange point that first runs in a step that reads stale values."""
    return UnsupportedModel(
        f"{where} has not run in the exact steps of this image, so that this step has no stale values of it: use more "
        "warmup_steps, or strategy=exact"
    )


def _not_of_a_band(error: ValueError) -> UnsupportedModel:
    return UnsupportedModel(f"{error}: this denoiser cannot be split, use plan cfg=2 or data=N")


@lru_cache(maxsize=1024)  # every attention layer asks, in every call
def _grid_of(starts: tuple[int, ...], group_rank: int, dim: int, across: int, own_tokens: int) -> LevelGrid | None:
    """Return the tokens of all ranks on the level where the band's map has so many."""
    bands = Bands(starts)
    own, stride = bands.size(group_rank), 1
    while stride <= max(own, across):
        rows, columns = -(-own // stride), -(-across // stride)
        if own_tokens == rows * columns:
            return LevelGrid(bands.at_level(group_rank, rows, bands.total), TokensAcross(columns), dim)
        stride *= 2
    return None


@lru_cache(maxsize=1024)  # every norm and convolution asks, in every call
def _rows_spec(shape: tuple[int, ...], dtype: torch.dtype, dim: int, rows: int) -> TensorSpec | None:
    """Return the spec of so many rows of a map along `dim`, counted from the end; None of no rows."""
    dim %= len(shape)
    return TensorSpec((*shape[:dim], rows, *shape[dim + 1 :]), dtype) if rows else None
