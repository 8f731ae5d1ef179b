"""Find the grid that tokens lie in, by perturbing frames, rows and columns of the latent.

    1. perturb the first frame, row, column      the number of tokens that change gives the number of each
    2. perturb random cells of that grid         exactly their tokens must change

A packed latent, a list of tokens, has no rows to perturb. The grid is then read from the model's positions: a table
with a row for each token, in which every feature varies along one axis of the grid.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.probe.capture import CallArguments, CapturedRun, Kind
from patchpar.shard.transformer.probe.latent import latent_shape, latent_size, with_other_latent
from patchpar.shard.transformer.probe.row_trace import TOLERANCE, moved_indices
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_plan import BlockPlan, GridSource
from patchpar.shard.transformer.token_ranges import TokenGrid

Watch = Callable[[CallArguments], CapturedRun]
MOST_AXES = 3
TRIALS = 2  # with random cells: a wrong grid passes one only if all its tokens are right by chance
Shapes = Mapping[int, tuple[int, int, int]]  # planes, rows and columns by the number of a convolution


class GridSources:
    """Finds the grids of tokens. `watched` runs the denoiser; one block of each kind is enough."""

    def __init__(self, watched: Watch, arguments: CallArguments, latent: str) -> None:
        self._watched, self._seen = watched, watched(arguments)
        self._arguments, self._latent = arguments, latent
        self._shape = latent_shape(arguments, latent)
        self._size = latent_size(arguments, latent)
        self._runs: dict[object, CapturedRun] = {}

    def of_all(self, plans: Mapping[Kind, BlockPlan]) -> tuple[BlockPlan, ...]:
        """Return the plans of kinds of blocks, each with the source of its grid if its tokens lie in one."""
        return tuple(
            replace(plan, origin=self._from_latent(kind, plan) or self._from_table(kind, plan))
            for kind, plan in plans.items()
        )

    def _from_latent(self, kind: Kind, plan: BlockPlan) -> GridSource | None:
        if self._shape is None or len(self._shape) <= 2:  # samples of different size, or tokens already
            return None
        found = self._axes(kind, plan, self._shape)
        grid = None if found is None else found.grid(self._shape)
        if found is None or grid is None or grid.num_tokens != round(plan.ratio * self._size):
            return None
        trials = (self._agrees(kind, plan, found, seed) for seed in range(TRIALS))
        return found if all(trials) else None

    def _axes(self, kind: Kind, plan: BlockPlan, shape: tuple[int, ...]) -> GridSource | None:
        """Return the dims of the latent along which tokens lie, and the patch size along each; None if in no grid."""
        dims, patches = [], []
        for dim in range(-len(shape), 0):
            moved = self._moved(kind, plan, self._first_line(dim))
            if moved is None or not moved.any():
                return None
            if moved.all() and shape[dim] > 1:  # channels
                continue
            lines, rest = divmod(len(moved), int(moved.sum()))
            if rest or shape[dim] % lines:
                return None
            dims.append(dim)
            patches.append(shape[dim] // lines)
        counts = [shape[dim] // patch for dim, patch in zip(dims, patches, strict=True)]
        if len(dims) > MOST_AXES or sum(count > 1 for count in counts) < 2:  # else they lie in a row
            return None
        return GridSource(dims=tuple(dims), patches=tuple(patches))

    def _first_line(self, dim: int) -> CapturedRun:
        assert self._shape is not None
        where = torch.zeros(self._shape, dtype=torch.bool)
        where.select(dim, 0).fill_(True)
        return self._run(dim, where)

    def _agrees(self, kind: Kind, plan: BlockPlan, origin: GridSource, seed: int) -> bool:
        """Whether the tokens of random cells change, and no others."""
        assert self._shape is not None
        sizes = [self._shape[dim] // patch for dim, patch in zip(origin.dims, origin.patches, strict=True)]
        cells = torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < 0.5
        where, among = cells, [1] * len(self._shape)
        for number, (dim, patch) in enumerate(zip(origin.dims, origin.patches, strict=True)):
            where, among[dim] = where.repeat_interleave(patch, number), self._shape[dim]
        moved = self._moved(kind, plan, self._run((origin, seed), where.view(among).expand(self._shape)))
        return moved is not None and torch.equal(moved, cells.flatten())

    def _run(self, name: object, where: Tensor) -> CapturedRun:
        """Run the denoiser with another latent where `where` is true; once for each name."""
        if name not in self._runs:
            self._runs[name] = self._watched(with_other_latent(self._arguments, self._latent, where))
        return self._runs[name]

    def _moved(self, kind: Kind, plan: BlockPlan, now: CapturedRun) -> Tensor | None:
        """Return which tokens differ from the run without perturbation."""
        if kind not in now:
            return None
        name, rows = next(iter(plan.inputs.items()))
        before, after = (seen[kind].arguments.tensors()[name] for seen in (self._seen, now))
        if before.shape != after.shape:
            return None
        tokens = round(plan.ratio * self._size)
        start = rows.start(before.shape[rows.dim], tokens)
        return moved_indices(before, after)[rows.dim][start : start + tokens].cpu()

    def _from_table(self, kind: Kind, plan: BlockPlan) -> GridSource | None:
        tensors = self._seen[kind].arguments.tensors()
        tokens = round(plan.ratio * self._size)
        for name, rows in list(plan.inputs.items())[1:]:
            if grid_of_table(rows.among(tensors[name], tokens), rows.dim) is not None:
                return GridSource(table=name)
        return None


def grid_of_table(table: Tensor, dim: int) -> TokenGrid | None:
    """Return the grid that the tokens along `dim` of `table`, of any shape, lie in; None if there is none.

    Every feature must vary along one axis of the grid only. `table` may be complex, as rotary embeddings are.
    """
    table = torch.view_as_real(table) if table.is_complex() else table
    x_TC = table.movedim(dim, 0).reshape(table.shape[dim], -1).float()
    if not x_TC.numel():
        return None
    breaks = [size for size in _divisors(len(x_TC)) if _is_outer(torch.unflatten(x_TC, 0, (-1, size)))]
    if not 1 <= len(breaks) < MOST_AXES:
        return None
    columns, *rest = [inner // outer for outer, inner in pairwise([1, *breaks, len(x_TC)])]
    rows, frames = (*rest, 1)[:2]
    return TokenGrid(frames, rows, columns)


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(2, number // 2 + 1) if number % size == 0)


def _is_outer(x_OIC: Tensor) -> bool:
    """Whether each feature varies along the outer dim or the inner one, never both, and some vary along either."""
    least = TOLERANCE * x_OIC.abs().amax()
    along_outer = ((x_OIC - x_OIC[:1]).abs() > least).any(1).any(0)
    along_inner = ((x_OIC - x_OIC[:, :1]).abs() > least).any(1).any(0)
    return bool(along_outer.any() and along_inner.any() and not (along_outer & along_inner).any())


def grid_of(shapes: Shapes) -> TokenGrid | None:
    """Return the one grid that all convolutions are over, by rows or frames, or None. Raises UnsupportedModel."""
    grids = {shape for shape in shapes.values() if shape[0] > 1} or set(shapes.values())
    if not grids:
        return None
    grid = TokenGrid(*grids.pop())
    if grids or any(not _fits(shape, grid) for shape in shapes.values()):
        raise UnsupportedModel("its convolutions are over different grids of its tokens")
    return grid


def _fits(shape: tuple[int, int, int], grid: TokenGrid) -> bool:
    return shape == grid or shape == (1, grid.frames, grid.rows * grid.columns)


def mixing_of(sums: frozenset[int], shapes: Shapes, grid: TokenGrid | None) -> TokenMixing:
    """Return the calls that mix tokens, without the arguments that count rows, which are not known yet."""
    over_frames = tuple(number for number, shape in shapes.items() if grid is not None and shape != grid)
    return TokenMixing(
        sums=tuple(sorted(sums)),
        convolutions=tuple(number for number in shapes if number not in over_frames),
        frame_convolutions=over_frames,
        of_video=grid is not None and grid.frames > 1,
    )
