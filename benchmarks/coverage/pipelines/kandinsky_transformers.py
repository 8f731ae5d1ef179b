"""Kandinsky 5 and 6."""

from __future__ import annotations

from tests.tiny import kandinsky_transformer_pipelines as kandinsky

from .entry import Entry

ENTRIES = (
    Entry(name="Kandinsky5T2VPipeline", build=kandinsky.text_to_video5, guidance="a call each"),
    Entry(name="Kandinsky5I2VPipeline", build=kandinsky.image_to_video5, guidance="a call each"),
    Entry(name="Kandinsky5T2IPipeline", build=kandinsky.text_to_image5, guidance="a call each"),
    Entry(name="Kandinsky5I2IPipeline", build=kandinsky.image_to_image5, guidance="a call each"),
    Entry(name="Kandinsky6TI2VAPipeline", build=kandinsky.text_to_video6, guidance="a call each"),
    Entry(name="Kandinsky6SRPipeline", build=kandinsky.super_resolution6, guidance="none", prompts=""),
)
