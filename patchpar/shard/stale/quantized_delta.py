"""Quantised difference to the receiver's copy, with error feedback.

CompactFusion (NeurIPS 2025) compresses differences with error feedback in synchronous exchanges. Here the exchange is
asynchronous: the difference is taken to the copy that the receiver will hold on arrival, because messages arrive in
order. Rounding errors are part of the next difference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.shard.kernels.quantize_delta import MOST_MESSAGES, SCALE, add_delta, quantize_delta


class QuantizedDelta:
    """A repeated message: tokens [..., D] with 8 or 4 bits a value and a scale for each head of each token.

    Sender and receivers hold the same copy [..., D], and add the same numbers to it.
    """

    def __init__(self, copy: Tensor, bits: int) -> None:
        self.copy, self.bits = copy, bits

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantised difference of `x` [..., D] to the copy, and add it to the copy.

        Levels [..., D] in int8, or two to a byte [..., (D + 1) // 2] in uint8, and scales [..., 1] in fp16.
        """
        return quantize_delta(self.copy, x.contiguous(), self.bits)

    def decode(self, received: Sequence[Tensor]) -> None:
        """Add a difference to the copy: levels [..., D], or packed, and scales [..., 1], as `encode` returns them."""
        decode_parts(self.copy, [(0, received)], self.bits)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of one message."""
        return delta_specs(tuple(self.copy.shape), self.bits)


def delta_specs(shape: tuple[int, ...], bits: int) -> tuple[TensorSpec, TensorSpec]:
    """Return the specs of the levels and scales of tokens [..., D] of this shape."""
    width = shape[-1] if bits == 8 else -(-shape[-1] // 2)
    levels = TensorSpec((*shape[:-1], width), torch.int8 if bits == 8 else torch.uint8)
    return levels, TensorSpec((*shape[:-1], 1), SCALE)


def decode_parts(copy: Tensor, received: Sequence[tuple[int, Sequence[Tensor]]], bits: int) -> None:
    """Add differences to parts of a copy [l, ..., D], as `QuantizedDelta.decode`; on a GPU those of 8 by one launch.

    `received`: the first token of each part, and its levels and scales.
    """
    for first in range(0, len(received), MOST_MESSAGES):
        starts, tensors = zip(*received[first : first + MOST_MESSAGES], strict=True)
        levels, scales = zip(*tensors, strict=True)
        add_delta(copy, levels, scales, starts, bits)
