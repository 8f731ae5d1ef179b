"""Public functions and classes of the package, with their docstrings, for tests that count what these state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import sources

PACKAGE = Path(__file__).parents[1] / "patchpar"
FILES = sorted(PACKAGE.rglob("*.py"))
CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Documented:
    """A public function, or the constructor of a public class, with the text that a caller reads."""

    function: Function
    text: str
    owner: ast.ClassDef | None = None

    @property
    def name(self) -> str:
        owner = "" if self.owner is None else f"{self.owner.name}."
        return f"{owner}{self.function.name}"


def tree_of(file: Path) -> ast.Module:
    """The tree of a file, parsed once for all tests."""
    return sources.tree_of(file.read_text())


def documented(tree: ast.Module) -> Iterator[Documented]:
    """Functions and methods without an underscore, in classes without one; constructors with their class's text."""
    todo: list[ast.Module | ast.ClassDef] = [tree]
    while todo:
        owner = todo.pop()
        of_class = owner if isinstance(owner, ast.ClassDef) else None
        for node in owner.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                todo.append(node)
            elif isinstance(node, Function):
                if not node.name.startswith("_"):
                    yield Documented(node, ast.get_docstring(node) or "", of_class)
                elif of_class is not None and node.name in CONSTRUCTORS:
                    text = f"{ast.get_docstring(of_class) or ''}\n{ast.get_docstring(node) or ''}"
                    yield Documented(node, text, of_class)


def arguments_of(function: Function) -> list[ast.arg]:
    given = function.args
    several = [given.vararg] * bool(given.vararg) + [given.kwarg] * bool(given.kwarg)
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *(each for each in several if each)]


def at(file: Path, found: Documented) -> str:
    """Where it is, for a message."""
    return f"{file.relative_to(PACKAGE)}:{found.function.lineno} {found.name}"
