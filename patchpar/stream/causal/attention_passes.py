"""Self-attention of a block-causal transformer: one class per kind of forward pass.

    SinkPass     the sink's tokens attend to themselves; their keys and values are stored
    BlockPass    one block attends to the window and the sink

Every block attends to itself, the blocks of its window, and the sink at a fixed distance from itself ("rolling", Live
Avatar, arXiv:2512.04677, section 4.3). The window holds keys rotated when they were written ("abs"), or unrotated keys
that are rotated at each read ("relative"), so that positions stay as small as in training. Both are the same function
up to rounding.

Shapes: B batch, L tokens, n attention heads of this rank, d width of a head.
"""

from typing import NamedTuple

from torch import Tensor

from patchpar.stream.causal.kv_window import KVWindow
from patchpar.stream.causal.rope import Rotary, RotaryPositions, rotate
from patchpar.stream.causal_options import CausalOptions


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
