"""Tell a block's convolutions over rows of tokens from those over frames, by the shapes of their inputs."""

from collections.abc import Mapping

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_ranges import TokenGrid

Shapes = Mapping[int, tuple[int, int, int]]  # planes, rows and columns by the number of a convolution


def grid_of(shapes: Shapes) -> TokenGrid | None:
    """Return the grid that the convolutions are over; None where there are none. Raises UnsupportedModel.

    A frame may be a plane of one convolution and one row of another.
    """
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
