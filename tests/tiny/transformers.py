"""Every transformer class of diffusers in small, by name: random weights, less than a million of them but for one.

`TRANSFORMERS["FluxTransformer2DModel"]` builds the model and gives calls of two sizes for it. A call may hold
caches that the model writes into: ask for a fresh one each time, and on each rank. `UNBUILT` names the classes that
have no entry, and why.
"""

from __future__ import annotations

import diffusers

from . import (
    transformers_audio,
    transformers_audiovisual,
    transformers_flux,
    transformers_hunyuan,
    transformers_image,
    transformers_joint,
    transformers_kandinsky,
    transformers_latent,
    transformers_linear,
    transformers_plain,
    transformers_video,
    transformers_wan,
)
from .transformers_entry import Tiny

_FAMILIES = (
    transformers_audiovisual,
    transformers_flux,
    transformers_hunyuan,
    transformers_image,
    transformers_joint,
    transformers_kandinsky,
    transformers_latent,
    transformers_linear,
    transformers_plain,
    transformers_audio,
    transformers_video,
    transformers_wan,
)

_ENTRIES = {entry.name: entry for family in _FAMILIES for entry in family.ENTRIES}

TRANSFORMERS: dict[str, Tiny] = {name: _ENTRIES[name] for name in sorted(_ENTRIES) if hasattr(diffusers, name)}
"""Class -> its entry, for all that the installed diffusers has."""

UNBUILT: dict[str, str] = {}
"""Class -> why it cannot be built or called here."""
