"""Memory that kernels take while they run, beside their arguments and results: copies in the layout of convolutions.

A convolution library computes in a layout of its own, with channels innermost or in groups of 8 or 16 (oneDNN's
"nChw16c", https://uxlfoundation.github.io/oneDNN/dev_guide_understanding_memory_formats.html; cuDNN's NHWC). Maps in
torch's usual layout, NCHW, are copied into it with the weight, and what comes out is copied back. A product of single
positions (kernel 1) reads them as they are. All other kernels that are recorded take less than TILES: matrix
products and attention have buffers of a few tiles.
"""

from patchpar.plan.replay.tape import Operator

TILES = 2 * 2**20
"""Bytes that any kernel may take, and what is too small to be counted: pages that tensors fill in part, messages.

CUDA's allocator takes as many at a time for small tensors."""
CHANNELS = 16
"""Of a group in the widest layout of oneDNN; channels are filled up to a multiple of it."""


def buffer_bytes(operator: Operator, element_size: int, *, in_layout: bool) -> int:
    """Return the most bytes that an operator takes before its result counts, which itself is not among them.

    While it computes: copies of its input and its weight, and the result in the same layout. When it has computed: that
    result, and the one that is returned. `in_layout`: its maps are channels_last, so that only the weight is copied.
    """
    if "convolution" not in operator.name or not operator.dims:
        return 0
    m, n, k = operator.dims
    weight, result = n * k * element_size, m * n * element_size
    if in_layout:
        return result + weight
    maps = max(0, operator.num_bytes - weight - result)  # with the bias, a number for each channel
    if maps >= m * k * element_size:
        return 0  # no position is read twice
    filled_up = m * -(-n // CHANNELS) * CHANNELS * element_size
    return filled_up + max(maps + weight, result)
