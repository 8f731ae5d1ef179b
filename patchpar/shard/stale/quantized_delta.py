"""Quantised difference to the receiver's copy, with error feedback.

CompactFusion (NeurIPS 2025) compresses differences with error feedback in synchronous exchanges. Here the exchange is
asynchronous: the difference is taken to the copy that the receiver will hold on arrival, because messages arrive in
order. Rounding errors are part of the next difference.
"""

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec

SCALE = torch.float16


class QuantizedDelta:
    """A repeated message: tokens [..., D] with 8 or 4 bits a value and a scale for each head of each token.

    Sender and receivers hold the same copy [..., D], and add the same numbers to it.
    """

    def __init__(self, copy: Tensor, bits: int) -> None:
        self.copy, self.bits = copy, bits
        self._most = 2 ** (bits - 1) - 1

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the quantised difference of `x` [..., D] to the copy, and add it to the copy.

        Levels [..., D] in int8, or two to a byte [..., (D + 1) // 2] in uint8, and scales [..., 1] in fp16.
        """
        difference = x.float() - self.copy.float()
        scale = (difference.abs().amax(-1, keepdim=True) / self._most).clamp(2.0**-14, 6e4).to(SCALE)
        levels = (difference / scale.float()).round_().clamp_(-self._most, self._most).to(torch.int8)
        sent = (levels if self.bits == 8 else _packed(levels), scale)
        self.decode(sent)
        return sent

    def decode(self, received: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Add a difference to the copy: levels [..., D], or packed, and scales [..., 1], as `encode` returns them."""
        levels, scale = received
        levels = levels if self.bits == 8 else _unpacked(levels, self.copy.shape[-1])
        self.copy.copy_(self.copy.float() + levels.float() * scale.float())

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of one message."""
        shape = self.copy.shape
        width = shape[-1] if self.bits == 8 else -(-shape[-1] // 2)
        return TensorSpec((*shape[:-1], width), torch.int8 if self.bits == 8 else torch.uint8), TensorSpec(
            (*shape[:-1], 1), SCALE
        )


def _packed(levels: Tensor) -> Tensor:
    """Pack two values of 4 bits into a byte; an odd last one gets a byte of its own."""
    unsigned = (levels + 8).to(torch.uint8)
    low, high = unsigned[..., ::2], unsigned[..., 1::2]
    high = torch.nn.functional.pad(high, (0, low.shape[-1] - high.shape[-1]))
    return low | (high << 4)


def _unpacked(packed: Tensor, width: int) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return both[..., :width].to(torch.int8) - 8
