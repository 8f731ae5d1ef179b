"""Every entry of the zoo of pipelines, by the name of its class."""

from __future__ import annotations

from . import (
    bria,
    cross_text,
    flux,
    kandinsky,
    kandinsky_transformers,
    language,
    motion,
    pixels,
    single_stream,
    unets_rarer,
    unets_sd,
    unets_xl,
    video,
)
from .entry import Entry, pipeline_classes

_FAMILIES = (
    bria,
    cross_text,
    flux,
    kandinsky,
    kandinsky_transformers,
    language,
    motion,
    pixels,
    single_stream,
    unets_rarer,
    unets_sd,
    unets_xl,
    video,
)
_ENTRIES = {entry.name: entry for family in _FAMILIES for entry in family.ENTRIES}

ZOO: dict[str, Entry] = {name: _ENTRIES[name] for name in sorted(_ENTRIES) if name in pipeline_classes()}
"""Class -> its entry, for all that the installed diffusers has."""

LEFT_OUT: dict[str, str] = {
    "ChromaInpaintPipeline": "its own call fails: it reads a setting that its transformer has not",
}
"""Class -> why it has no entry."""
