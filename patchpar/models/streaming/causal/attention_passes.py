"""Self-attention of a block-causal transformer: one class per kind of forward pass, and the KV cache of a step.

    SinkPass     the sink's tokens attend to themselves; their keys and values are stored
    BlockPass    one block attends to the window and the sink
    KVWindow     keys and values of the last blocks in a ring buffer, and of a sink frame

Every block attends to itself, the blocks of its window, and the sink at a fixed distance from itself ("rolling", Live
Avatar, arXiv:2512.04677, section 4.3). The window holds keys rotated when they were written ("abs"), or unrotated keys
that are rotated at each read ("relative"), so that positions stay as small as in training. Both are the same function
up to rounding.

Shapes: B batch, L tokens, n attention heads of this rank, d width of a head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.models.streaming.causal.rope import Rotary, RotaryPositions, rotate
from patchpar.models.streaming.config import CausalOptions


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
    """Keys and values of one denoising step, by layer. `has_sink`: whether a sink frame has been stored.

        buffer of a layer:   [ sink frame | slot 0 | slot 1 | ... | slot w-1 ]

    The first k blocks stay in slots 0 to k-1, as sinks (LongLive, arXiv:2509.22622, section 3.3); block i from k on is
    in slot k + (i - k) mod (w - k). Attention does not depend on the order of keys, so nothing is moved. All memory is
    allocated at the start.
    """

    def __init__(self, size: WindowSize, device: torch.device, dtype: torch.dtype) -> None:
        self.size = size
        length = size.sink_tokens + size.window * size.block_tokens
        whole, sink = ((size.layers, 1, tokens, size.heads, size.head_width) for tokens in (length, size.sink_tokens))
        self._keys, self._values = (torch.zeros(whole, device=device, dtype=dtype) for _ in range(2))
        self._sink_keys = torch.zeros(sink, device=device, dtype=dtype)
        self._blocks = 0
        self.has_sink = False

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


class AttentionOperands(NamedTuple):
    """Operands of one attention: queries [B, L, n, d], keys and values [B, M, n, d], and a mask [L, M] or None."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None


class SinkPass:
    """Tokens at positions `rotary` that attend to themselves only, stored as the sink."""

    def __init__(self, memory: KVWindow, rotary: Rotary) -> None:
        self._memory, self._rotary = memory, rotary

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> AttentionOperands:
        """Store k and v [B, L, n, d] of a layer as the sink; return its operands. All are given before rotation."""
        self._memory.put_sink(layer, k, v)
        return AttentionOperands(rotate(q, self._rotary), rotate(k, self._rotary), v, None)


class BlockPass:
    """Block number `block`. `memory.advance` has to be called before.

    `sink`: positions of the sink with absolute positions; by default those of one frame.
    """

    def __init__(
        self,
        memory: KVWindow,
        positions: RotaryPositions,
        options: CausalOptions,
        block: int,
        sink: Rotary | None = None,
    ) -> None:
        self._memory = memory
        frames, is_absolute = options.frames, options.positions == "abs"
        start = (block if is_absolute else options.window - 1) * frames
        frame = [start + options.sink_distance]
        self._own = positions.at(range(start, start + frames))
        self._sink = (sink or positions.at(frame)) if is_absolute else None
        if not is_absolute:
            slots = [start - age * frames + number for age in memory.ages for number in range(frames)]
            self._all = positions.at((frame if memory.has_sink else []) + slots)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> AttentionOperands:
        """Store k and v [B, L, n, d] of a layer in the window; return operands that attend to all of it."""
        memory = self._memory
        memory.put(layer, k if self._sink is None else rotate(k, self._own), v)
        memory.set_sink(layer, self._sink)
        keys, values = memory.visible(layer)
        return AttentionOperands(
            rotate(q, self._own), keys if self._sink is not None else rotate(keys, self._all), values, None
        )
