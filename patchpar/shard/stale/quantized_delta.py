"""Quantised difference to the receiver's copy, with error feedback.

CompactFusion (NeurIPS 2025) compresses differences with error feedback in synchronous exchanges. Here the exchange is
asynchronous: the difference is taken to the copy that the receiver will hold on arrival, because messages arrive in
order. Rounding errors are part of the next difference.
"""

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.shard.kernels.quantize_delta import SCALE, add_delta, quantize_delta


class QuantizedDelta:
    """A repeated message: tokens [..., D] with 8 or 4 bits a value and a scale for each head of each token.

    Sender and receivers hold the same copy [..., D], and add the same numbers to it. On GPUs it is contiguous.
    """

    def __init__(self, copy: Tensor, bits: int) -> None:
        self.copy, self.bits = copy, bits

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantised difference of `x` [..., D] to the copy, and add it to the copy.

        Levels [..., D] in int8, or two to a byte [..., (D + 1) // 2] in uint8, and scales [..., 1] in fp16.
        """
        return quantize_delta(self.copy, x.contiguous(), self.bits)

    def decode(self, received: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Add a difference to the copy: levels [..., D], or packed, and scales [..., 1], as `encode` returns them."""
        levels, scale = received
        add_delta(self.copy, levels, scale, self.bits)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of one message."""
        shape = self.copy.shape
        width = shape[-1] if self.bits == 8 else -(-shape[-1] // 2)
        return TensorSpec((*shape[:-1], width), torch.int8 if self.bits == 8 else torch.uint8), TensorSpec(
            (*shape[:-1], 1), SCALE
        )
