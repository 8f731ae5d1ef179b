"""Differences to a copy that sender and receivers hold, in few bits, and the same numbers added to the copies.

    scale = largest |difference| of a head / most       most = 127 for 8 bits, 7 for 4
    copy += round(difference / scale) * scale

Tokens are [..., D], with D numbers of one head in a row, of which each has a scale [..., 1] in fp16. Levels are int8
[..., D], or two to a byte, uint8 [..., (D + 1) // 2]. See `shard.stale.quantized_delta` for the method. The kernel that
quantises is that of `kernels.pack_tokens`, which has these functions for a twin.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op, nothing
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels.map_layout import power_of_2

SCALE = torch.float16
SCALES = (2.0**-14, 6e4)  # smallest and largest
TILE = 4096  # numbers of a program
MOST_MESSAGES = 8  # whose differences the kernel has pointers for


def most_of(bits: int) -> int:
    """Return the largest level of so many bits."""
    return 2 ** (bits - 1) - 1


def quantize_delta(copy: Tensor, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return levels and scales of the difference of `x` [..., D] to `copy` [..., D], and add them to `copy`."""
    difference, most = x.float() - copy.float(), most_of(bits)
    scale = (difference.abs().amax(-1, keepdim=True) / most).clamp(*SCALES).to(SCALE)
    levels = (difference / scale.float()).round_().clamp_(-most, most).to(torch.int8)
    levels = levels if bits == 8 else _packed(levels)
    add_delta_eager(copy, [levels], [scale], [0], bits)
    return levels, scale


def add_delta_eager(
    copy: Tensor, levels: Sequence[Tensor], scales: Sequence[Tensor], starts: Sequence[int], bits: int
) -> None:
    """Add differences to parts of `copy` [l, ..., D], which begin at the tokens `starts`.

    Of each part the levels [k, ..., D], or packed, and scales [k, ..., 1].
    """
    for level, scale, start in zip(levels, scales, starts, strict=True):
        part = copy.narrow(0, start, level.shape[0])
        whole = level if bits == 8 else _unpacked(level, copy.shape[-1])
        part.copy_(part.float() + whole.float() * scale.float())


def _packed(levels: Tensor) -> Tensor:
    """Pack two values of 4 bits into a byte; an odd last one gets a byte of its own."""
    unsigned = (levels + 8).to(torch.uint8)
    low, high = unsigned[..., ::2], unsigned[..., 1::2]
    high = torch.nn.functional.pad(high, (0, low.shape[-1] - high.shape[-1]))
    return low | (high << 4)


def _unpacked(packed: Tensor, width: int) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return both[..., :width].to(torch.int8) - 8


_ADD_DELTA = Program("patchpar.shard.kernels.programs.quantize_delta", "add_delta_program")


def launch_add_delta(
    copy: Tensor, levels: Sequence[Tensor], scales: Sequence[Tensor], starts: Sequence[int], bits: int
) -> None:
    """Launch the kernel for all parts of `copy` [l, ..., D], all tensors contiguous: programs for a few heads of each.

    Levels and scales as in the twin.
    """
    token, counts = math.prod(copy.shape[1:]), tuple([scale.numel() for scale in scales])
    (blocks,), numbers = _heads_of(max(counts), copy.shape[-1])
    _ADD_DELTA.launch(
        (blocks, len(counts)),
        (copy, tuple(levels), tuple(scales)),
        (tuple([start * token for start in starts]), counts),
        MESSAGES=len(counts),
        IS_BYTE=bits == 8,
        **numbers,
    )


def _heads_of(heads: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid for so many heads, and the numbers that a program is made for."""
    pairs = power_of_2(-(-width // 2))
    of_program = max(1, TILE // (2 * pairs))
    return (-(-heads // of_program),), {"WIDTH": width, "PAIRS": pairs, "HEADS": of_program}


add_delta = fused_op(
    "add_delta(Tensor(a!) copy, Tensor[] levels, Tensor[] scales, int[] starts, int bits) -> ()",
    eager=add_delta_eager,
    launch=launch_add_delta,
    fake=nothing,
)
