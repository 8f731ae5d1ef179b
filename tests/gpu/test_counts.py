"""Launches, messages and synchronisations of one rank on a GPU, counted without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu.denoisers import SHORT, Denoiser, sdxl
from benchmarks.gpu.strategies import FakeRank, fake_rank
from patchpar.shard.stale.cache import StaleCache

PIXELS = 512


@pytest.fixture(scope="module")
def rank() -> Iterator[FakeRank]:
    with fake_rank(1, 4) as found:
        yield found


@pytest.fixture(scope="module")
def unet(rank: FakeRank) -> Denoiser:
    return sdxl(PIXELS, layers=SHORT["sdxl"])


def test_a_value_that_is_read_counts_as_a_synchronisation(
    rank: FakeRank, unet: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not rank.steps(unet, "displaced")["stale"].syncs
    end = StaleCache.end

    def reading(cache: StaleCache) -> None:
        cache.drift.sum().item()
        end(cache)

    monkeypatch.setattr(StaleCache, "end", reading)
    counts = rank.steps(unet, "displaced")["stale"]
    assert len(counts.syncs) == 1
    assert next(iter(counts.syncs)).startswith("_local_scalar_dense at patchpar/")


def test_a_kernel_more_counts_as_a_launch_more(rank: FakeRank, unet: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rank.steps(unet, "exact")["exact"]
    forward = torch.nn.SiLU.forward
    monkeypatch.setattr(torch.nn.SiLU, "forward", lambda module, x: forward(module, x).mul_(1))
    after = rank.steps(unet, "exact")["exact"]
    more = sum(after.launches.values()) - sum(before.launches.values())
    assert more == after.launches["mul_"] - before.launches["mul_"] > 0
    assert after.operations == before.operations
