"""`ModelFacts`: what a session must know of a video model, which its first rank has loaded."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of a model that a session needs. `audio`: the model's AudioInputs, or None if it takes no audio.

    `per_latent`: images per latent frame. `spatial`: pixels per latent pixel. `starts_from_image`: it needs a
    reference. `hears_speech`: it takes pose videos and several voices. `late`: latent frames, at most, by which the
    images of a latent frame are late. `blends`: whether the embeddings of all prompts have one length, so that they
    can be blended.
    """

    audio: Any
    per_latent: int
    spatial: int
    starts_from_image: bool = False
    hears_speech: bool = False
    late: int = 0
    blends: bool = True
