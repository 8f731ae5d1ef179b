"""KV cache of one denoising step: keys and values of the last blocks in a ring buffer, and of a sink frame.

    buffer of a layer:   [ sink frame | slot 0 | slot 1 | ... | slot w-1 ]

The first k blocks stay in slots 0 to k-1, as sinks (LongLive, arXiv:2509.22622, section 3.3); block i from k on is in
slot k + (i - k) mod (w - k).

Attention does not depend on the order of keys, so nothing is moved. All memory is allocated at the start.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from patchpar.stream.causal.rope import Rotary, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """`window` blocks of `block_tokens` tokens, the current one and `sinks` included, and a sink of `sink_tokens`."""

    layers: int
    window: int
    block_tokens: int
    sink_tokens: int
    heads: int
    head_width: int
    sinks: int = 0


class KVWindow:
    """Keys and values of one denoising step, by layer. `has_sink`: whether a sink frame has been stored."""

    def __init__(self, size: WindowSize, device: torch.device, dtype: torch.dtype) -> None:
        self.size = size
        length = size.sink_tokens + size.window * size.block_tokens
        whole, sink = ((size.layers, 1, tokens, size.heads, size.head_width) for tokens in (length, size.sink_tokens))
        self._keys, self._values = (torch.zeros(whole, device=device, dtype=dtype) for _ in range(2))
        self._sink_keys = torch.zeros(sink, device=device, dtype=dtype)
        self._blocks = 0
        self.has_sink = False

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
        """How many blocks before the current one, 0, each visible slot is in the window, in slot order.

        Sinks move up to the oldest of the other blocks, as if none had left the window between them.
        """
        newest, size = self._blocks - 1, self.size
        sinks = [min(newest, size.window - 1) - slot for slot in range(min(size.sinks, self._blocks))]
        others = range(size.sinks, self.visible_blocks)
        return sinks + [(newest - slot) % (size.window - size.sinks) for slot in others]

    def forget(self, *, keep_sinks: bool = False) -> int:
        """Drop all blocks, or all but the sinks; returns how many were dropped. The sink frame stays."""
        before, self._blocks = self._blocks, min(self._blocks, self.size.sinks) if keep_sinks else 0
        return before - self._blocks

    def advance(self) -> None:
        """Begin a new block, which takes the oldest slot."""
        self._blocks += 1

    def put(self, layer: int, keys_BLhd: Tensor, values_BLhd: Tensor) -> None:
        """Write the current block's keys and values of one layer, [1, block_tokens, heads, head_width]."""
        size = self.size
        newest = self._blocks - 1
        slot = newest if newest < size.sinks else size.sinks + (newest - size.sinks) % (size.window - size.sinks)
        start = size.sink_tokens + slot * size.block_tokens
        self._keys[layer][:, start : start + size.block_tokens] = keys_BLhd
        self._values[layer][:, start : start + size.block_tokens] = values_BLhd

    def put_sink(self, layer: int, keys_BLhd: Tensor, values_BLhd: Tensor) -> None:
        """Write the sink's keys before rotation and values of one layer, [1, sink_tokens, heads, head_width]."""
        self._sink_keys[layer] = keys_BLhd
        self._values[layer][:, : self.size.sink_tokens] = values_BLhd
        self.has_sink = True

    def set_sink(self, layer: int, rotary: Rotary | None) -> None:
        """Rotate the sink's keys to the positions of `rotary`; None leaves them unrotated."""
        if self.has_sink:
            keys = self._sink_keys[layer]
            self._keys[layer][:, : self.size.sink_tokens] = keys if rotary is None else rotate(keys, rotary)

    def visible(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views (keys, values) [1, M, heads, head_width] of the sink, if there is one, and the filled slots."""
        size = self.size
        seen = slice(
            0 if self.has_sink else size.sink_tokens, size.sink_tokens + self.visible_blocks * size.block_tokens
        )
        return self._keys[layer][:, seen], self._values[layer][:, seen]
