"""What an image session and the ranks say to one another: orders to all, images from the rank that ends them."""

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
    """A finished image: the first image of what the pipeline returned."""

    number: int
    image: Any
