"""Latent previews: RGB as a linear map of latent channels, fitted to generated images.

No decoder and no knowledge of the model is needed: the last latents of an image and the image itself give a small
least-squares problem.

Shapes: C channels, H and W of the latents, T tokens.
"""

from typing import Any

import numpy as np
from PIL import Image

SIDE = 128  # pixels of the shorter side of a preview, which the page enlarges
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
        cells = self._cells(latents_CHW)
        if cells is None:
            return None
        scale = max(1, round(SIDE / min(cells.size)))
        return cells.resize((cells.width * scale, cells.height * scale), Image.Resampling.BICUBIC)

    def enlarged(self, latents_CHW: Any, size: tuple[int, int]) -> Image.Image | None:
        """An image of `size`, width and height in pixels, of latents (C, H, W); None without a fit for C channels."""
        cells = self._cells(latents_CHW)
        return None if cells is None else cells.resize(size, Image.Resampling.BICUBIC)

    def _cells(self, latents_CHW: Any) -> Image.Image | None:
        """An image with a pixel for each cell of latents (C, H, W)."""
        latents = _as_grid(latents_CHW)
        if latents is None or latents.shape[0] not in self._weights:
            return None
        channels, height, width = latents.shape
        colours = _with_one(latents) @ self._weights[channels]
        cells = np.round(np.clip(colours, 0, 1) * 255).astype(np.uint8).reshape(height, width, 3)
        return Image.fromarray(cells)


def grid_of(latents: Any, size: tuple[int, int]) -> Any:
    """Return latents of one image as a grid (C, H, W), as they are or of packed tokens; None if they are neither.

    `latents`: (1, C, H, W), with frames (1, C, 1, H, W) or (1, 1, C, H, W), or tokens (1, T, C) in the order of rows.
    `size`: width and height of the image in pixels, which says how tokens make rows.
    """
    values = np.asarray(latents)[0]
    if values.ndim == 4:
        frames = [axis for axis in (1, 0) if values.shape[axis] == 1]
        return values.squeeze(frames[0]) if frames else None
    if values.ndim == 3:
        return values
    return _grid_of_tokens(values, size) if values.ndim == 2 else None


def _grid_of_tokens(tokens_TC: Any, size: tuple[int, int]) -> Any:
    width, height = size
    count = len(tokens_TC)
    rows = round((count * height / width) ** 0.5)
    if rows == 0 or count % rows or (count // rows) * height != rows * width:
        return None
    return tokens_TC.T.reshape(-1, rows, count // rows)


def _as_grid(latents: Any) -> Any:
    """As float64 (C, H, W); None for other shapes, such as packed latents."""
    values = np.asarray(latents, np.float64)
    return values if values.ndim == 3 and np.isfinite(values).all() else None


def _with_one(latents_CHW: Any) -> Any:
    """Channels and a constant 1 of each cell, shape (H * W, C + 1)."""
    cells = latents_CHW.reshape(latents_CHW.shape[0], -1).T
    return np.concatenate([cells, np.ones((len(cells), 1))], 1)
