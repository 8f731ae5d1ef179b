"""One rank of several on a GPU that is not there, and the networks that it runs; the GPUs that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from benchmarks.gpu.denoisers import DENOISERS, Denoiser
from benchmarks.gpu.strategies import FakeRank, fake_rank
from tests.gpu.cards import cards_of, nccl_on_one_card
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


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    """Type of the devices of tests marked gpu."""
    kind = str(request.config.getoption("--gpu-device"))
    assert kind == "cpu" or torch.cuda.is_available(), "torch finds no GPU here: use --gpu-device cpu to try the tests"
    return kind


@pytest.fixture
def cards(request: pytest.FixtureRequest, kind: str) -> Iterator[Callable[..., list[str]]]:
    """A device for each rank, which use NCCL. See `cards_of`."""
    with nccl_on_one_card(request.config):
        yield partial(cards_of, request.config)


@pytest.fixture(scope="session")
def card(kind: str) -> str:
    """The device that all ranks use."""
    return "cpu" if kind == "cpu" else f"{kind}:0"
