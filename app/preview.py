"""Latent previews: RGB as a linear map of latent channels, fitted to generated images.

No decoder and no knowledge of the model is needed: the last latents of an image and the image itself give a small
least-squares problem.

Shapes: C channels, H and W of the latents.
"""

from typing import Any

import numpy as np
from PIL import Image

SIDE = 256  # pixels of the shorter side of a preview
RIDGE = 1e-3  # keeps the map small where a channel never varies


class ColourMap:
    """Maps latents (C, H, W) to images, once it has been fitted."""

    def __init__(self) -> None:
        self._weights: dict[int, Any] = {}

    def fit(self, latents_CHW: Any, image: Image.Image) -> None:
        """Fit the map to an image and its last latents (C, H, W). Latents of other shapes are ignored."""
        latents = _as_grid(latents_CHW)
        if latents is None:
            return
        channels, height, width = latents.shape
        cells = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BOX), np.float64) / 255
        rows = _with_one(latents)
        gram = rows.T @ rows + RIDGE * len(rows) * np.eye(rows.shape[1])
        self._weights[channels] = np.linalg.solve(gram, rows.T @ cells.reshape(-1, 3))

    def show(self, latents_CHW: Any) -> Image.Image | None:
        """A small image of latents (C, H, W), or None without a fit for C channels."""
        latents = _as_grid(latents_CHW)
        if latents is None or latents.shape[0] not in self._weights:
            return None
        channels, height, width = latents.shape
        colours = _with_one(latents) @ self._weights[channels]
        cells = np.round(np.clip(colours, 0, 1) * 255).astype(np.uint8).reshape(height, width, 3)
        scale = max(1, round(SIDE / min(height, width)))
        return Image.fromarray(cells).resize((width * scale, height * scale), Image.Resampling.BICUBIC)


def _as_grid(latents: Any) -> Any:
    """As float64 (C, H, W); None for other shapes, such as packed latents."""
    values = np.asarray(latents, np.float64)
    return values if values.ndim == 3 and np.isfinite(values).all() else None


def _with_one(latents_CHW: Any) -> Any:
    """Channels and a constant 1 of each cell, shape (H * W, C + 1)."""
    cells = latents_CHW.reshape(latents_CHW.shape[0], -1).T
    return np.concatenate([cells, np.ones((len(cells), 1))], 1)
