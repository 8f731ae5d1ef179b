"""How much of a device's processors a kernel keeps busy: tiles of a matrix product, and blocks of a norm's rows."""

TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of a product that one processor computes at a time, as of NVIDIA's guide to matrix products
(DU-09799-001, section 2.3): fewer are read more often."""
SPLIT = 1024
"""Of the inner dim of a product: parts of it that several processors compute where there are fewer tiles than these."""
ROWS_AT_A_TIME, SECONDS_OF_A_ROW = 16, 1.35e-6
"""Of an RMS norm's rows, each of which has a block of 128 threads in torch's kernel (layer_norm_kernel.cu), on one
processor, which has 2,048 threads; and how long a block takes, by the norms of FLUX's heads in docs/figures/gpu.md."""


def busy_part(dims: tuple[int, ...], processors: int) -> float:
    """Return which part of what the processors could compute meanwhile a product (m, n, k) is.

    Each computes tile after tile; tiles at the edges are computed whole, and in the last wave some processors idle.
    """
    m, n, k = dims
    return max(_busy_part(m, n, k, rows, columns, processors) for rows, columns in TILES)


def _busy_part(m: int, n: int, k: int, rows: int, columns: int, processors: int) -> float:
    tiles = -(-m // rows) * -(-n // columns)
    splits = max(1, min(processors // tiles, k // SPLIT))
    waves = -(-tiles * splits // processors)
    return m * n * splits / (waves * processors * rows * columns)


def seconds_of_rows(rows: int, processors: int) -> float:
    """Return the seconds in which the processors begin and end a block for each row of a norm, however narrow."""
    return rows * SECONDS_OF_A_ROW / (ROWS_AT_A_TIME * processors)
