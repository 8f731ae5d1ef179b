"""Every transformer class of diffusers in small, by name: random weights, less than a million of them.

`TRANSFORMERS["FluxTransformer2DModel"]` builds the model and gives calls of two sizes for it. `UNBUILT` names the
classes that have no entry, and why.
"""

from __future__ import annotations

from . import (
    transformers_flux,
    transformers_hunyuan,
    transformers_image,
    transformers_joint,
    transformers_kandinsky,
    transformers_latent,
    transformers_plain,
    transformers_sound,
    transformers_video,
    transformers_wan,
)
from .transformers_entry import Tiny

_FAMILIES = (
    transformers_flux,
    transformers_hunyuan,
    transformers_image,
    transformers_joint,
    transformers_kandinsky,
    transformers_latent,
    transformers_plain,
    transformers_sound,
    transformers_video,
    transformers_wan,
)

TRANSFORMERS: dict[str, Tiny] = {
    entry.name: entry
    for entry in sorted((entry for family in _FAMILIES for entry in family.ENTRIES), key=lambda entry: entry.name)
}

UNBUILT: dict[str, str] = {}
"""Class -> why it cannot be built or called here."""
