"""Networks whose blocks sleep, which takes no processor time: their passes can be timed beside other programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 256
FLOAT = 4  # bytes
ROWS, COLUMNS, PATCH = 60, 2, 2
"""Of a transformer's tokens: rows that divide into 2, 3, 4, 5 and 6 pieces."""
BLOCKS = 8


class SleepingBlock(nn.Module):
    """A block of about so many bytes that sleeps for so long."""

    def __init__(self, seconds: float, num_bytes: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.randn(num_bytes // (WIDTH * FLOAT), WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, WIDTH] that depend on all weights."""
        time.sleep(self.seconds)
        return torch.tanh(x + (x @ self.weight.T).mean(-1, keepdim=True))


class SleepingChain(nn.Module):
    """Blocks one after the other, of given seconds and bytes."""

    def __init__(self, blocks: Sequence[tuple[float, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(*each) for each in blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last block does, [1, WIDTH]."""
        for block in self.blocks:
            x = block(x)
        return x


class SleepingTransformer:
    """A small PixArt of BLOCKS blocks. Each sleeps `seconds` for all tokens, and for some of them less."""

    def __init__(self) -> None:
        from diffusers import PixArtTransformer2DModel

        torch.manual_seed(0)
        self.network: Any = PixArtTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=BLOCKS,
            cross_attention_dim=64,
            caption_channels=32,
            sample_size=PATCH * ROWS,
            patch_size=PATCH,
            use_additional_conditions=False,
            norm_num_groups=8,
        )
        self.network.eval().requires_grad_(False)
        self.call: dict[str, Any] = {
            "hidden_states": torch.randn(1, 4, PATCH * ROWS, PATCH * COLUMNS),
            "encoder_hidden_states": torch.randn(1, 6, 32),
            "timestep": torch.tensor([500]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "return_dict": False,
        }
        self.seconds = 0.0
        for block in self.network.transformer_blocks:
            block.norm1.register_forward_pre_hook(self._sleep)

    def _sleep(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        time.sleep(self.seconds * args[0].shape[1] / (ROWS * COLUMNS))
