"""Messages between an image session and its ranks: requests to all ranks, images from the rank that decodes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """One image to generate: arguments of the pipeline, and the seed of its generator."""

    number: int
    arguments: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedImage:
    """A finished image: the first of those that the pipeline returned."""

    number: int
    image: Any
