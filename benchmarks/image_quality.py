"""PSNR and SSIM of images by torchmetrics, which the `dev` extra installs; the package itself does without."""

from __future__ import annotations

from torch import Tensor

MAX_DB = 150.0
"""The PSNR of equal images, for infinity has no mean."""
WINDOW = 11
"""Pixels of the Gaussian window of SSIM, whose sigma is 1.5."""


def psnr_db(images_BCHW: Tensor, reference_BCHW: Tensor, *, most: float = MAX_DB) -> float:
    """Mean over images of the peak signal-to-noise ratio in dB, values in 0..1; `most` dB for equal images."""
    return each_psnr_db(images_BCHW, reference_BCHW, most=most).mean().item()


def each_psnr_db(images_BCHW: Tensor, reference_BCHW: Tensor, *, most: float = MAX_DB) -> Tensor:
    """The same of each image, shape (B)."""
    from torchmetrics.functional.image import peak_signal_noise_ratio  # takes seconds

    each_B = peak_signal_noise_ratio(
        images_BCHW, reference_BCHW, data_range=1.0, reduction="none", dim=tuple(range(1, images_BCHW.ndim))
    )
    return each_B.clamp(max=most)


def ssim(images_BCHW: Tensor, reference_BCHW: Tensor) -> float:
    """Mean structural similarity, values in 0..1 (Wang et al. 2004, doi:10.1109/TIP.2003.819861).

    Of whole windows: torchmetrics' own mean includes those that stick out, with mirrored pixels.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    _, map_BCHW = structural_similarity_index_measure(
        images_BCHW.double(), reference_BCHW.double(), data_range=1.0, return_full_image=True
    )
    edge = WINDOW // 2
    return map_BCHW[..., edge:-edge, edge:-edge].mean().item()
