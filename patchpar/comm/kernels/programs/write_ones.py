"""Triton program that is launched to see whether any is."""

import triton
import triton.language as tl


@triton.jit
def write_ones_program(x, BLOCK: tl.constexpr):
    """Write BLOCK ones."""
    tl.store(x + tl.arange(0, BLOCK), 1.0)
