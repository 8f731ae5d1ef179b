"""KV cache of one denoising step: keys and values of the last blocks in a ring buffer, and of a sink frame.

    buffer of a layer:   [ sink frame | slot 0 | slot 1 | ... | slot w-1 ]      block i is in slot i mod w

Attention does not depend on the order of keys, so nothing is moved. All memory is allocated at the start.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from patchpar.stream.causal.rope import Rotary, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """`window` blocks of `block_tokens` tokens, the current one included, and a sink of `sink_tokens`."""

    layers: int
    window: int
    block_tokens: int
    sink_tokens: int
    heads: int
    head_width: int


class KVWindow:
    """Keys and values of one denoising step, by layer."""

    def __init__(self, size: WindowSize, device: torch.device, dtype: torch.dtype) -> None:
        self.size = size
        length = size.sink_tokens + size.window * size.block_tokens
        whole, sink = ((size.layers, 1, tokens, size.heads, size.head_width) for tokens in (length, size.sink_tokens))
        self._keys, self._values = (torch.zeros(whole, device=device, dtype=dtype) for _ in range(2))
        self._sink_keys = torch.zeros(sink, device=device, dtype=dtype)
        self._blocks = 0
        self._has_sink = False

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, which stay the same throughout a stream."""
        return sum(x.numel() * x.element_size() for x in (self._keys, self._values, self._sink_keys))

    @property
    def visible_blocks(self) -> int:
        """Blocks in the window, the current one included."""
        return min(self._blocks, self.size.window)

    @property
    def ages(self) -> list[int]:
        """How many blocks ago each visible slot was written, in slot order; 0 is the current block."""
        newest = self._blocks - 1
        return [(newest - slot) % self.size.window for slot in range(self.visible_blocks)]

    @property
    def has_sink(self) -> bool:
        """Whether a sink frame has been stored."""
        return self._has_sink

    def forget(self) -> None:
        """Drop all blocks. The sink stays."""
        self._blocks = 0

    def advance(self) -> None:
        """Begin a new block, which takes the oldest slot."""
        self._blocks += 1

    def put(self, layer: int, keys_BLhd: Tensor, values_BLhd: Tensor) -> None:
        """Write the current block's keys and values of one layer, [1, block_tokens, heads, head_width]."""
        size = self.size
        start = size.sink_tokens + (self._blocks - 1) % size.window * size.block_tokens
        self._keys[layer][:, start : start + size.block_tokens] = keys_BLhd
        self._values[layer][:, start : start + size.block_tokens] = values_BLhd

    def put_sink(self, layer: int, keys_BLhd: Tensor, values_BLhd: Tensor) -> None:
        """Write the sink's keys before rotation and values of one layer, [1, sink_tokens, heads, head_width]."""
        self._sink_keys[layer] = keys_BLhd
        self._values[layer][:, : self.size.sink_tokens] = values_BLhd
        self._has_sink = True

    def set_sink(self, layer: int, rotary: Rotary | None) -> None:
        """Rotate the sink's keys to the positions of `rotary`; None leaves them unrotated."""
        if self._has_sink:
            keys = self._sink_keys[layer]
            self._keys[layer][:, : self.size.sink_tokens] = keys if rotary is None else rotate(keys, rotary)

    def visible(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views (keys, values) [1, M, heads, head_width] of the sink, if there is one, and the filled slots."""
        size = self.size
        seen = slice(
            0 if self._has_sink else size.sink_tokens, size.sink_tokens + self.visible_blocks * size.block_tokens
        )
        return self._keys[layer][:, seen], self._values[layer][:, seen]
