"""Modules with a method say where it is from: a paper, another project, or a decision where it is our own."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docstrings import FILES, PACKAGE
from tests.sources import tree_of

LEAST = 0.95

METHODS = (
    "strategies",
    "shard/attention",
    "shard/stale",
    "shard/kernels/programs",
    "shard/piped",
    "shard/stages",
    "shard/tensor",
    "shard/weights",
    "shard/unet",
    "shard/vae",
    "shard/transformer/probe",
    "models/streaming/causal",
    "models/streaming/fifo",
    "stream/causal",
    "stream/fifo",
    "pipeline/planner",
    "plan/replay",
    "plan/kv_selection.py",
    "plan/link_model.py",
    "plan/resync.py",
)
"""Folders and files with methods: what is sharded, exchanged, estimated, and how."""
SOURCE = re.compile(
    r"arXiv|doi\.org|https?://|\bet al\.|\b(?:19|20)\d\d\)|docs/decisions|\bdecision 00\d\d|\bdocs/\w[\w-]*\.md"
)


def texts_of(source: str) -> str:
    """The docstrings of a module and of what stands at its top."""
    tree = tree_of(source)
    named = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return "\n".join(ast.get_docstring(node) or "" for node in (tree, *named))


def without_source(sources: Mapping[str, str]) -> list[str]:
    """Modules that name no source, neither themselves nor in the text of a folder of methods that they are in."""
    folders = {
        name.removesuffix("/__init__.py"): text for name, text in sources.items() if name.endswith("__init__.py")
    }
    silent = []
    for name, source in sources.items():
        parents = [parent.as_posix() for parent in Path(name).parents if parent.as_posix() in folders]
        texts = [texts_of(source), *(ast.get_docstring(tree_of(folders[each])) or "" for each in parents)]
        if not name.endswith("__init__.py") and not any(SOURCE.search(text) for text in texts):
            silent.append(name)
    return silent


def methods() -> dict[str, str]:
    names = {file.relative_to(PACKAGE).as_posix(): file for file in FILES}
    return {
        name: file.read_text()
        for name, file in names.items()
        if any(name == each or name.startswith(f"{each}/") for each in METHODS)
    }


def test_methods_name_their_source() -> None:
    sources = methods()
    count = sum(not name.endswith("__init__.py") for name in sources)
    assert count > 80
    silent = without_source(sources)
    assert 1 - len(silent) / count >= LEAST, "\n".join(silent)


def test_every_place_is_there() -> None:
    assert [each for each in METHODS if not (PACKAGE / each).exists()] == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Ring attention (arXiv:2310.01889).", 0),
        ("Moments are merged as in Chan, Golub and LeVeque (1979).", 0),
        ("Our own; decision 0017 has the reasons.", 0),
        ("Merges moments.", 1),
        ("Takes 2010 bytes, and number 0017.", 1),
    ],
)
def test_a_method_without_a_source_is_found(text: str, missing: int) -> None:
    assert len(without_source({"strategies/new.py": f'"""{text}"""'})) == missing


def test_a_folder_speaks_for_its_files() -> None:
    file = {"strategies/new/a.py": "'A part.'"}
    assert without_source({"strategies/new/__init__.py": "'PipeFusion (arXiv:2405.14430).'", **file}) == []
    assert without_source({"strategies/new/__init__.py": "'A method.'", **file}) == ["strategies/new/a.py"]
