"""The docs as a site have every page and every public name. `make docs` builds it and takes a warning as an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import patchpar
from benchmarks.diagrams.__main__ import DIAGRAMS

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
MENU = (REPOSITORY / "mkdocs.yml").read_text()
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if not page.name.startswith("0"))
"""Without decisions, to which their own index leads."""


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_in_the_menu_once(page: str) -> None:
    assert len(re.findall(rf"(: |- ){re.escape(page)}$", MENU, re.MULTILINE)) == 1


def test_the_menu_has_no_page_that_is_gone() -> None:
    named = set(re.findall(r"(?<=[ -])[\w/-]+\.md$", MENU, re.MULTILINE))
    outside = {"CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    outside |= {"pipelines/README.md", "integrations/comfyui/README.md"}
    assert named - outside == set(PAGES)


def test_the_menu_can_be_read() -> None:
    """Plain YAML: what a colon without quotes does to it is seen here, and not only by `make docs`."""
    site = yaml.safe_load(MENU)
    pages = [page for section in site["nav"] for page in next(iter(section.values()))]
    assert {"README.md"} | {path for page in pages if isinstance(page, dict) for path in page.values()} >= set(PAGES)
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load("site_description: several GPUs: the same image")


def test_the_hook_of_the_site_is_no_part_of_it() -> None:
    """Nor is what Python compiles of it."""
    excluded = yaml.safe_load(MENU)["exclude_docs"].split()
    hooks = {path.name for path in DOCS.glob("*.py")} | {"__pycache__"}
    assert set(excluded) == hooks


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: patchpar\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(patchpar.__all__)


@pytest.mark.parametrize("words", ["quantization", "sequence parallelism", "latency", "throughput", "out of memory"])
def test_what_people_search_for_is_answered(words: str) -> None:
    """By a question of the FAQ, in the words of who searches."""
    questions = re.findall(r"^\*\*(.*\?)\*\*", (DOCS / "faq.md").read_text(), re.MULTILINE)
    assert [question for question in questions if words in question.lower()]


CONCEPTS = (
    "plan",
    "exact-patch",
    "stale-patch",
    "partial-context",
    "tokens",
    "guidance",
    "structure-guidance",
    "parallel-vae",
    "streaming",
    "weights",
    "stages",
)
HOW_TOS = (
    "first-image",
    "serve",
    "operate-a-server",
    "several-machines",
    "ray",
    "lora-and-controlnet",
    "large-images",
    "larger-models",
    "stream",
    "add-a-model",
    "add-a-strategy",
    "choose-a-plan",
    "any-module",
    "simulate-a-strategy",
)


@pytest.mark.parametrize("concept", CONCEPTS)
def test_a_concept_is_generated(concept: str) -> None:
    """Each has a diagram of its own, which `make diagrams` makes again, with words for those who do not see it."""
    others = "".join((DOCS / f"{other}.md").read_text() for other in CONCEPTS if other != concept)
    diagrams = re.findall(
        r"!\[([^\]]{20,})\]\(\.\./assets/figures/([\w-]+)\.svg\)", (DOCS / f"{concept}.md").read_text()
    )
    own = {name for _, name in diagrams if name in DIAGRAMS and f"/{name}.svg" not in others}
    assert own, f"{concept}.md has no diagram of its own"


def test_every_how_to_is_there() -> None:
    assert {page.stem for page in (DOCS / "howto").glob("*.md")} == set(HOW_TOS)
