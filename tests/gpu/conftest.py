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


class Models(dict[str, Denoiser]):
    """Each is built when a test asks for it first."""

    def __missing__(self, name: str) -> Denoiser:
        self[name] = DENOISERS[name](PIXELS, layers=LAYERS[name])
        return self[name]


@pytest.fixture(scope="module")
def models(rank: FakeRank) -> dict[str, Denoiser]:
    return Models()
