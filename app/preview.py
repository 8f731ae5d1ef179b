"""What latents will look like: colours as a linear map of their channels, learnt from pictures that have been drawn.

It needs no decoder and no knowledge of any model: the last latents of a picture and the picture itself make a least
squares problem of a few unknowns.

Shapes: C channels, H and W of the latents.
"""

from typing import Any

import numpy as np
from PIL import Image

SIDE = 256  # pixels of the shorter side of a preview
RIDGE = 1e-3  # keeps the map small where a channel never varies


class ColourMap:
    """From latents (C, H, W) to pictures. Knows nothing until it has seen one picture."""

    def __init__(self) -> None:
        self._weights: dict[int, Any] = {}

    def learn(self, latents_CHW: Any, picture: Image.Image) -> None:
        """Fit the map to one picture and its last latents. What is no grid of channels is left alone."""
        latents = _as_grid(latents_CHW)
        if latents is None:
            return
        channels, height, width = latents.shape
        cells = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BOX), np.float64) / 255
        rows = _with_one(latents)
        gram = rows.T @ rows + RIDGE * len(rows) * np.eye(rows.shape[1])
        self._weights[channels] = np.linalg.solve(gram, rows.T @ cells.reshape(-1, 3))

    def show(self, latents_CHW: Any) -> Image.Image | None:
        """A small picture of the latents, or None where no picture of this kind has been seen."""
        latents = _as_grid(latents_CHW)
        if latents is None or latents.shape[0] not in self._weights:
            return None
        channels, height, width = latents.shape
        colours = _with_one(latents) @ self._weights[channels]
        cells = np.round(np.clip(colours, 0, 1) * 255).astype(np.uint8).reshape(height, width, 3)
        scale = max(1, round(SIDE / min(height, width)))
        return Image.fromarray(cells).resize((width * scale, height * scale), Image.Resampling.BICUBIC)


def _as_grid(latents: Any) -> Any:
    """As float64 (C, H, W); None for latents in another order, such as packed ones."""
    values = np.asarray(latents, np.float64)
    return values if values.ndim == 3 and np.isfinite(values).all() else None


def _with_one(latents_CHW: Any) -> Any:
    """One row per cell: its channels and a one."""
    cells = latents_CHW.reshape(latents_CHW.shape[0], -1).T
    return np.concatenate([cells, np.ones((len(cells), 1))], 1)
