"""The diagrams of the docs are those that `python -m benchmarks.diagrams` draws, and can be read."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.diagrams.__main__ import DIAGRAMS, FOLDER
from benchmarks.diagrams.canvas import DARK, LETTER, LIGHT

REPOSITORY = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
PAGES = {
    "overview": "docs/README.md",
    "mesh": "docs/plan.md",
    "halos": "docs/exact-patch.md",
    "staleness": "docs/stale-patch.md",
    "context": "docs/partial-context.md",
    "rings": "docs/tokens.md",
    "guidance": "docs/guidance.md",
    "structure": "docs/structure-guidance.md",
    "vae": "docs/parallel-vae.md",
    "stages": "docs/streaming.md",
    "slots": "docs/weights.md",
    "piped": "docs/stages.md",
    "icon": "mkdocs.yml",
}


@pytest.mark.parametrize("name", DIAGRAMS)
def test_what_is_shown_is_what_is_generated(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == DIAGRAMS[name](), "draw them again: make diagrams"


def test_every_concept_has_its_diagram() -> None:
    assert set(PAGES) == set(DIAGRAMS)
    for name, page in PAGES.items():
        assert f"assets/figures/{name}.svg" in (REPOSITORY / page).read_text(), page


@pytest.mark.parametrize("name", DIAGRAMS)
def test_words_stay_on_the_page_and_colours_follow_the_reader(name: str) -> None:
    diagram = ET.fromstring(DIAGRAMS[name]())
    width = float(diagram.get("width", "0"))
    for words in diagram.iter(f"{SVG}text"):
        long = LETTER * float(words.get("font-size", "0")) * len(words.text or "")
        before = {"start": 0.0, "middle": long / 2, "end": long}[words.get("text-anchor", "start")]
        left = float(words.get("x", "0")) - before
        assert left >= 0, words.text
        assert left + long <= width, words.text
    style = "".join(found.text or "" for found in diagram.iter(f"{SVG}style"))
    assert set(LIGHT) == set(DARK)
    assert "prefers-color-scheme: dark" in style
