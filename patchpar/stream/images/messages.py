"""What a picture session and the ranks say to one another: orders to all, pictures from the rank that ends them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """One picture to draw: arguments of the pipeline, and the seed of its generator."""

    number: int
    arguments: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedImage:
    """A finished picture: the first image of what the pipeline returned."""

    number: int
    picture: Any
