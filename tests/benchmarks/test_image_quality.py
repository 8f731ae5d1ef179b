"""PSNR and SSIM of the benchmarks, by torchmetrics, are those that the package itself computes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.image_quality import MAX_DB, psnr_db, ssim
from patchpar.pipeline import image_metrics
from tests.tensors import noise

REFERENCE = noise(1, 3, 48, 64).sigmoid()


@pytest.mark.parametrize("error", [0.3, 0.01, 1e-4])
def test_both_agree(error: float) -> None:
    images = (REFERENCE + error * noise(1, 3, 48, 64, seed=1)).clamp(0, 1)
    one, other = (each[0].permute(1, 2, 0).numpy() for each in (images, REFERENCE))
    assert psnr_db(images, REFERENCE) == pytest.approx(image_metrics.psnr(one, other), abs=1e-3)
    assert ssim(images, REFERENCE) == pytest.approx(image_metrics.ssim(one, other), abs=1e-5)


def test_the_mean_is_over_images() -> None:
    pair = torch.cat([REFERENCE + 0.1, REFERENCE + 0.01])
    assert psnr_db(pair, REFERENCE.repeat(2, 1, 1, 1)) == pytest.approx(30.0, abs=1e-3)
    assert psnr_db(pair, pair) == MAX_DB
