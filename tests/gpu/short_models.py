"""SDXL and FLUX with few layers, at the size and on the number of ranks of the counts."""

from __future__ import annotations

from typing import Any

WORLD, PIXELS = 4, 1024
LAYERS: dict[str, dict[str, Any]] = {
    "sdxl": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (320, 640),
        "transformer_layers_per_block": (1, 1),
        "attention_head_dim": (5, 10),
        "layers_per_block": 1,
    },
    "flux": {"num_layers": 1, "num_single_layers": 1},
}
