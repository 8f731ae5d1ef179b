"""One rank of several on a GPU that is not there, and the networks that it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.gpu.denoisers import DENOISERS, Denoiser
from benchmarks.gpu.strategies import FakeRank, fake_rank
from tests.gpu.short_models import LAYERS, PIXELS, WORLD


@pytest.fixture(scope="module")
def rank() -> Iterator[FakeRank]:
    with fake_rank(1, WORLD) as found:
        yield found


@pytest.fixture(scope="module")
def models(rank: FakeRank) -> dict[str, Denoiser]:
    return {name: build(PIXELS, layers=LAYERS[name]) for name, build in DENOISERS.items()}
