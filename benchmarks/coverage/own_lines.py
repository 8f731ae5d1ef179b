"""Lines of the package that know a model class by name: what a class needs of its own to be split."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import patchpar

PACKAGE = Path(patchpar.__file__).parent
STREAMS = ("models/streaming/", "stream/")
"""Adapters of causal video models, which splitting knows nothing of."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_naming(names: Iterable[str]) -> dict[str, list[str]]:
    """Name -> "file:line" of every piece of code with that name in it; comments and docstrings are no code."""
    words = list(_words())
    return {name: [position for position, word in words if name in word] for name in names}


@cache
def _words() -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"{path.relative_to(PACKAGE)}:{line}", word)
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(STREAMS)
        for line, word in words_of(path.read_text())
    )


def words_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, names and texts) of Python code."""
    nodes = [*ast.walk(ast.parse(source))]
    reported = {id(node.body[0].value) for node in nodes if isinstance(node, DOCUMENTED) and _is_reported(node)}
    for node in nodes:
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word):
                yield node.lineno, word
            case ast.Constant(value=str(word)) if id(node) not in reported:
                yield node.lineno, word


def _is_reported(node: ast.AST) -> bool:
    return ast.get_docstring(node, clean=False) is not None  # type: ignore[arg-type]
