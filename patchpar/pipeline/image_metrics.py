"""Differences between two images: PSNR, SSIM, largest difference, and an image of the difference.

An image is a PIL image or an array of shape (H, W, C) or (H, W): floats in 0..1, or uint8 in 0..255.
All is computed in float64 on the 0..1 scale, so that figures do not depend on how the image was stored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    Array: TypeAlias = NDArray[np.float64]

_WINDOW = 11  # pixels; window and constants are those of the SSIM paper
_SIGMA = 1.5  # pixels
_C1, _C2 = 0.01**2, 0.03**2


class DifferenceMap(NamedTuple):
    """A grey image of |a - b|, and the factor by which it was brightened."""

    image: Image
    gain: float


def as_array(image: Any) -> Array:
    """Return the image as float64 of shape (H, W, C), 0..1. Raises ValueError."""
    values = np.asarray(image)
    scale = 255.0 if values.dtype == np.uint8 else 1.0
    if values.ndim not in (2, 3):
        raise ValueError(f"an image has 2 or 3 dimensions (rows, columns, channels), not {values.ndim}")
    return np.atleast_3d(values.astype(np.float64)) / scale


def as_image(values: Any) -> Image:
    """Return a PIL image of 8 bits per channel; values outside 0..1 are clipped. Raises ValueError."""
    from PIL import Image

    eight_bit = np.round(np.clip(as_array(values), 0.0, 1.0) * 255).astype(np.uint8)
    return Image.fromarray(eight_bit.squeeze(axis=2) if eight_bit.shape[2] == 1 else eight_bit)


def psnr(one: Any, other: Any) -> float:
    """Return the peak signal-to-noise ratio in dB for a peak of 1; infinite for equal images. Raises ValueError."""
    a, b = _pair(one, other)
    error = float(np.mean((a - b) ** 2))
    return math.inf if error == 0.0 else -10.0 * math.log10(error)


def max_abs_diff(one: Any, other: Any) -> float:
    """Return the largest difference of any channel of any pixel, on the 0..1 scale. Raises ValueError."""
    a, b = _pair(one, other)
    return float(np.max(np.abs(a - b)))


def ssim(one: Any, other: Any) -> float:
    """Return the mean structural similarity, 1 for equal images (Wang et al. 2004, doi:10.1109/TIP.2003.819861).

    Gaussian window of 11 pixels with sigma 1.5, whole windows only, mean over the channels. Raises ValueError for
    images of different shape, or smaller than the window.
    """
    a, b = _pair(one, other)
    if min(a.shape[:2]) < _WINDOW:
        raise ValueError(f"SSIM needs at least {_WINDOW} x {_WINDOW} pixels: {a.shape[0]}x{a.shape[1]} is too small")
    mean_a, mean_b = _blur(a), _blur(b)
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + _C1) / (mean_a**2 + mean_b**2 + _C1)
    structure = (2 * covariance + _C2) / (var_a + var_b + _C2)
    return float(np.mean(luminance * structure))


def difference_map(one: Any, other: Any) -> DifferenceMap:
    """Return the largest difference over the channels of each pixel, brightened until the maximum is white.

    Raises ValueError for images of different shape.
    """
    a, b = _pair(one, other)
    difference = np.abs(a - b).max(axis=2)
    gain = 1.0 / max(float(difference.max()), 1e-12)
    return DifferenceMap(as_image(difference * gain), gain)


def _pair(one: Any, other: Any) -> tuple[Array, Array]:
    a, b = as_array(one), as_array(other)
    if a.shape != b.shape:
        raise ValueError(f"images of different shape cannot be compared: {a.shape} and {b.shape}")
    return a, b


def _blur(values: Array) -> Array:
    """Return the weighted mean over each whole window, (H - 10, W - 10, C)."""
    offsets = np.arange(_WINDOW) - _WINDOW // 2
    weights = np.exp(-(offsets**2) / (2 * _SIGMA**2))
    weights /= weights.sum()
    rows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW, axis=0) @ weights
    return np.lib.stride_tricks.sliding_window_view(rows, _WINDOW, axis=1) @ weights
