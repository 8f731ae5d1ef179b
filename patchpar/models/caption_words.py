"""Words that the embedded models have learnt: those of their captions. Other words they read as single letters."""

import re
from pathlib import PurePath

SCENES = (
    "a an and at balloon blue calm desert dunes green hills house lake left mountains night noon on orange pine purple "
    "red right snowy sunset the tower tree white yellow"
)
WORDS = dict.fromkeys(("embedded", "embedded-dit", "scenes-unet", "scenes-dit"), SCENES)  # names and their folders
WORD = re.compile(r"[^\W\d_]+|\d")


def caption_words(model: str) -> frozenset[str]:
    """Return the words that an embedded model has learnt, by its name or folder; none for any other model."""
    return frozenset(WORDS.get(PurePath(model).name, "").split())


def unknown_words(prompt: str, known: frozenset[str]) -> tuple[str, ...]:
    """Return the words of a prompt that are not in `known`, in their order; none if nothing is known of the model."""
    words = dict.fromkeys(WORD.findall(prompt.lower()))
    return tuple(word for word in words if word not in known) if known else ()
