"""Send what has changed since the receiver's copy, quantised, and let nothing be lost.

CompactFusion (NeurIPS 2025) compresses residuals with error feedback in synchronous exchanges. Here the exchange is
asynchronous: the copy that the residual is taken against is the one the receiver will hold when it arrives, because
messages arrive in order. What rounding left out is part of the next difference.
"""

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec

SCALE = torch.float16


class QuantizedDelta:
    """One message, again and again: tokens [..., D] as 8 or 4 bits each, with a scale for each head of each token.

    Sender and receivers hold the same copy, and add the same numbers to it.
    """

    def __init__(self, copy: Tensor, bits: int) -> None:
        self.copy, self.bits = copy, bits
        self._most = 2 ** (bits - 1) - 1

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """The difference of `x` to the copy, and move the copy."""
        difference = x.float() - self.copy.float()
        scale = (difference.abs().amax(-1, keepdim=True) / self._most).clamp(2.0**-14, 6e4).to(SCALE)
        levels = (difference / scale.float()).round_().clamp_(-self._most, self._most).to(torch.int8)
        sent = (levels if self.bits == 8 else _packed(levels), scale)
        self.decode(sent)
        return sent

    def decode(self, received: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Move the copy by what was sent."""
        levels, scale = received
        levels = levels if self.bits == 8 else _unpacked(levels, self.copy.shape[-1])
        self.copy.copy_(self.copy.float() + levels.float() * scale.float())

    def specs(self) -> tuple[TensorSpec, ...]:
        """What one message looks like."""
        shape = self.copy.shape
        width = shape[-1] if self.bits == 8 else -(-shape[-1] // 2)
        return TensorSpec((*shape[:-1], width), torch.int8 if self.bits == 8 else torch.uint8), TensorSpec(
            (*shape[:-1], 1), SCALE
        )


def _packed(levels: Tensor) -> Tensor:
    """Two values of 4 bits in a byte, an odd last one by itself."""
    unsigned = (levels + 8).to(torch.uint8)
    low, high = unsigned[..., ::2], unsigned[..., 1::2]
    high = torch.nn.functional.pad(high, (0, low.shape[-1] - high.shape[-1]))
    return low | (high << 4)


def _unpacked(packed: Tensor, width: int) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return both[..., :width].to(torch.int8) - 8
