"""Figures of image quality: closed forms, a slow second opinion, and what must not pass."""

import math

import numpy as np
import pytest
from PIL import Image

from patchpar.pipeline.image_metrics import as_array, as_image, difference_map, max_abs_diff, psnr, ssim


def noise(seed: int, shape: tuple[int, ...] = (24, 20, 3)) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


def test_equal_images() -> None:
    image = noise(0)
    assert psnr(image, image) == math.inf
    assert ssim(image, image) == pytest.approx(1.0)
    assert max_abs_diff(image, image) == 0.0
    assert np.asarray(difference_map(image, image).image).max() == 0


def test_psnr_of_a_constant_error() -> None:
    grey = np.full((16, 16, 3), 0.5)
    assert psnr(grey, grey + 0.1) == pytest.approx(20.0)
    assert psnr(grey, grey + 0.01) == pytest.approx(40.0)


def test_storage_does_not_matter() -> None:
    eight_bit = (noise(1) * 255).astype(np.uint8)
    image = Image.fromarray(eight_bit)
    assert psnr(image, eight_bit / 255) > 300
    assert as_array(image.convert("L")).shape == (24, 20, 1)
    assert np.array_equal(np.asarray(as_image(eight_bit / 255)), eight_bit)


def test_ssim_of_flat_images_is_its_luminance_term() -> None:
    a, b = 0.2, 0.6
    expected = (2 * a * b + 1e-4) / (a * a + b * b + 1e-4)
    assert ssim(np.full((16, 16), a), np.full((16, 16), b)) == pytest.approx(expected)


def slow_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """The formula of the paper, window by window."""
    axis = np.arange(-5, 6)
    window = np.exp(-(axis[:, None] ** 2 + axis[None, :] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for row in range(a.shape[0] - 10):
        for column in range(a.shape[1] - 10):
            x, y = a[row : row + 11, column : column + 11], b[row : row + 11, column : column + 11]
            mx, my = (window * x).sum(), (window * y).sum()
            vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
            cxy = (window * (x - mx) * (y - my)).sum()
            values.append((2 * mx * my + 1e-4) * (2 * cxy + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    return float(np.mean(values))


def test_ssim_agrees_with_the_slow_formula() -> None:
    a = noise(2, (17, 15))
    b = np.clip(a + 0.2 * noise(3, (17, 15)), 0, 1)
    assert ssim(a, b) == pytest.approx(slow_ssim(a, b), abs=1e-12)


def test_worse_images_score_worse() -> None:
    image, error = noise(4) * 0.5 + 0.25, noise(5) - 0.5
    figures = [(psnr(image, image + k * error), ssim(image, image + k * error)) for k in (0.01, 0.1, 0.5)]
    assert figures == sorted(figures, reverse=True)


def test_the_difference_map_shows_the_place() -> None:
    image = np.zeros((16, 16, 3))
    other = image.copy()
    other[3, 7, 1] = 0.25
    grey = np.asarray(difference_map(image, other).image)
    assert np.argwhere(grey).tolist() == [[3, 7]]
    assert grey[3, 7] == 255
    assert difference_map(image, other).gain == pytest.approx(4.0)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(24, 20, 3\) and \(24, 24, 3\)"):
        psnr(noise(0), noise(0, (24, 24, 3)))
    with pytest.raises(ValueError, match="8x8 is too small"):
        ssim(noise(0, (8, 8)), noise(1, (8, 8)))
    with pytest.raises(ValueError, match="not 4"):
        psnr(noise(0, (1, 2, 3, 4)), noise(0, (1, 2, 3, 4)))
