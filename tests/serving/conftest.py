"""One server for each module: of a fake generator, or of the embedded model on one device in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from patchpar import ParallelPipeline
from patchpar.serving import generation
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from patchpar.serving.warm_up import warm_up_arguments
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import client_of

SMALL_SIDE = 192  # pixels: previews are fitted to the first image


@pytest.fixture(autouse=True, scope="session")
def small_warm_up() -> Iterator[None]:
    """Servers of these tests make their first images, which nobody sees, smaller than the model does by itself."""

    def small(*of: Any) -> tuple[dict[str, Any], tuple[int, int]]:
        arguments, (width, height) = warm_up_arguments(*of)
        if "image" in arguments or min(width, height) <= SMALL_SIDE:
            return arguments, (width, height)
        return {**arguments, "width": SMALL_SIDE, "height": SMALL_SIDE}, (SMALL_SIDE, SMALL_SIDE)

    with patch.object(generation, "warm_up_arguments", small):
        yield


@pytest.fixture
def fake() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
def service(fake: Any) -> Iterator[ImageService]:
    """Of the fake generator, ready; two requests may wait."""
    found = ImageService(fake, ServerSettings(max_queue=2))
    found.load()
    yield found
    fake.gate.set()
    found.close()


@pytest.fixture
def app(service: ImageService) -> Any:
    return application(service)


@pytest.fixture
def client(app: Any) -> Any:
    return client_of(app)


@pytest.fixture(scope="session")
def pipe() -> Iterator[ParallelPipeline]:
    """The embedded model on one device in this process."""
    with ParallelPipeline.from_pretrained("embedded", devices="cpu") as found:
        yield found


@pytest.fixture(scope="module")
def embedded(pipe: ParallelPipeline) -> Iterator[ImageService]:
    """A service of that pipeline, ready."""
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu",)))
    generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
    generator.close = lambda: None  # type: ignore[method-assign]  # other modules use the pipeline
    found = ImageService(generator, ServerSettings(port=0))
    found.load()
    yield found
    found.close()
