"""How much of a device's processors a kernel keeps busy: tiles of a matrix product, and blocks of a norm's rows."""

from dataclasses import dataclass

TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of a product that one processor computes at a time, as of NVIDIA's guide to matrix products
(DU-09799-001, section 2.3): fewer are read more often."""
SPLIT = 1024
"""Of the inner dim of a product: parts of it that several processors compute where there are fewer tiles than these."""
SUM = 4
"""Bytes of a value of such a part, in fp32, which is written and read again where the parts are added up (split K in
NVIDIA's CUTLASS, media/docs/efficient_gemm.md)."""
ROWS_AT_A_TIME, SECONDS_OF_A_ROW = 16, 1.35e-6
"""Of an RMS norm's rows, each of which has a block of 128 threads in torch's kernel (layer_norm_kernel.cu), on one
processor, which has 2,048 threads; and how long a block takes, by the norms of FLUX's heads in docs/figures/gpu.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """Those of a device. `rate`: FLOP/s of all together; `cache_rate`: bytes per second that their cache passes."""

    number: int
    rate: float
    cache_rate: float


def product_seconds(flops: int, dims: tuple[int, ...], processors: Processors) -> float:
    """Return the seconds of a product (m, n, k) of so many FLOPs, with the tiles and parts that take least.

    Each processor computes tile after tile; tiles at the edges are computed whole, and in the last wave some idle.
    """
    m, n, k = dims
    choices = [(tile, parts) for tile in TILES for parts in {1, _most_parts(m, n, k, tile, processors.number)}]
    return min(
        flops / (_busy_part(m, n, tile, parts, processors.number) * processors.rate)
        + _bytes_of_sums(m, n, parts) / processors.cache_rate
        for tile, parts in choices
    )


def _tiles(m: int, n: int, tile: tuple[int, int]) -> int:
    rows, columns = tile
    return -(-m // rows) * -(-n // columns)


def _most_parts(m: int, n: int, k: int, tile: tuple[int, int], processors: int) -> int:
    """Return in how many parts of the inner dim all processors have work."""
    return max(1, min(processors // _tiles(m, n, tile), k // SPLIT))


def _busy_part(m: int, n: int, tile: tuple[int, int], parts: int, processors: int) -> float:
    """Return which part of what the processors could compute meanwhile a product is."""
    rows, columns = tile
    waves = -(-_tiles(m, n, tile) * parts // processors)
    return m * n * parts / (waves * processors * rows * columns)


def _bytes_of_sums(m: int, n: int, parts: int) -> int:
    return 2 * parts * SUM * m * n if parts > 1 else 0


def seconds_of_rows(rows: int, processors: int) -> float:
    """Return the seconds in which the processors begin and end a block for each row of a norm, however narrow."""
    return rows * SECONDS_OF_A_ROW / (ROWS_AT_A_TIME * processors)
