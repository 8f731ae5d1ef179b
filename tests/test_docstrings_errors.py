"""Public functions that raise an error name it in their docstring, and constructors in that of their class.

What counts is what a function's own lines raise, and what private functions of the same file raise that it calls.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.docstrings import FILES, Documented, Function, at, documented, tree_of
from tests.sources import statements_of

LEAST = 0.95
NOT_FOR_CALLERS = {
    "NotImplementedError": "an interface",
    "StopIteration": "the protocol of iterators",
    "StopAsyncIteration": "the protocol of iterators",
    "AssertionError": "a fault of the package",
    "Exit": "the exit code of a command",
    "SystemExit": "the exit code of a process",
}
REFERS = ("See ", "As `")
"""Docstrings that leave it to another one, mostly that of an interface."""
RAISES_AS = re.compile(r"\b[Rr]aises? (?:as|what) ")
BUILTINS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}


class Package:
    """Bases and docstrings of classes, and what functions return that make exceptions, by name."""

    def __init__(self, trees: Mapping[Path, ast.Module]) -> None:
        nodes = [node for tree in trees.values() for node in statements_of(tree)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        functions = [node for node in nodes if isinstance(node, Function)]
        self._bases = {node.name: [last_name(base) for base in node.bases] for node in classes}
        self._texts = {
            (node.name, each.name): ast.get_docstring(each) or ""
            for node in classes
            for each in node.body
            if isinstance(each, Function)
        }
        self._returned = {node.name: last_name(node.returns) for node in functions if node.returns is not None}

    def line_of(self, name: str) -> set[str]:
        """A class and all of its bases, without those that every exception has."""
        if name in BUILTINS:
            return {base.__name__ for base in BUILTINS[name].__mro__} - {"object", "Exception", "BaseException"}
        return {name}.union(*(self.line_of(base) for base in self._bases.get(name, ())))

    def text_of_base(self, found: Documented) -> str:
        """The docstring of a method that has none of its own: that of the class that it overrides."""
        todo = [] if found.owner is None else list(self._bases.get(found.owner.name, ()))
        for base in todo:
            if text := self._texts.get((base, found.function.name)):
                return text
            todo += self._bases.get(base, ())
        return ""

    def is_exception(self, name: str) -> bool:
        if name in BUILTINS:
            return issubclass(BUILTINS[name], BaseException)
        return any(self.is_exception(base) for base in self._bases.get(name, ()))

    def of(self, raised: ast.expr) -> str | None:
        """The class that `raise` raises, by name; None where it is not known: an error that was caught."""
        name = last_name(raised.func if isinstance(raised, ast.Call) else raised)
        name = name if self.is_exception(name) else self._returned.get(name, "")
        return name if self.is_exception(name) and not name.startswith("_") else None

    def catches(self, handlers: list[ast.ExceptHandler], name: str) -> bool:
        caught = set[str]()
        for each in handlers:
            kinds = each.type.elts if isinstance(each.type, ast.Tuple) else [each.type]
            caught |= {"Exception" if kind is None else last_name(kind) for kind in kinds}
        return bool(caught & (self.line_of(name) | {"Exception", "BaseException"}))


def last_name(node: ast.expr) -> str:
    """`Name` of `Name`, `module.Name` and `Name[T]`; empty for anything else."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Module:
    """What the functions of one file raise."""

    def __init__(self, tree: ast.Module, package: Package) -> None:
        self._package = package
        owners = [node for node in statements_of(tree) if isinstance(node, ast.ClassDef)]
        self._private = {
            (None if isinstance(owner, ast.Module) else owner.name, node.name): node
            for owner in (tree, *owners)
            for node in owner.body
            if isinstance(node, Function) and node.name.startswith("_")
        }
        self._known: dict[tuple[str | None, str], set[str]] = {}

    def raised(self, function: Function, owner: str | None) -> set[str]:
        """Names of the exceptions that a caller may get. `owner`: the class of a method."""
        return {name for node in function.body for name in self._of(node, owner)} - set(NOT_FOR_CALLERS)

    def _of(self, node: ast.AST, owner: str | None) -> Iterator[str]:
        if isinstance(node, Function | ast.Lambda | ast.ClassDef) or is_command(node):
            return
        if isinstance(node, ast.Try):
            for inside in node.body:
                yield from (name for name in self._of(inside, owner) if not self._package.catches(node.handlers, name))
            for after in (*node.handlers, *node.orelse, *node.finalbody):
                yield from self._of(after, owner)
            return
        if isinstance(node, ast.Raise) and node.exc is not None and (name := self._package.of(node.exc)):
            yield name
        if isinstance(node, ast.Call):
            yield from self._of_private(node.func, owner)
        for child in ast.iter_child_nodes(node):
            yield from self._of(child, owner)

    def _of_private(self, called: ast.expr, owner: str | None) -> Iterator[str]:
        key: tuple[str | None, str] = (None, called.id if isinstance(called, ast.Name) else "")
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
            key = (owner, called.attr)
        if key in self._private:
            if key not in self._known:
                self._known[key] = set()  # a function that calls itself raises nothing more
                self._known[key] = self.raised(self._private[key], key[0])
            yield from self._known[key]


def is_command(node: ast.AST) -> bool:
    """Whether it is the body of a command, whose errors are printed."""
    return isinstance(node, ast.With) and any("friendly_errors" in ast.unparse(each) for each in node.items)


def unnamed(found: Documented, module: Module, package: Package) -> set[str] | None:
    """What it raises and does not name; None for a function that raises nothing. A base class is a name too."""
    raised = module.raised(found.function, None if found.owner is None else found.owner.name)
    if not raised:
        return None
    text = found.text.strip() or package.text_of_base(found)
    if text.startswith(REFERS) or RAISES_AS.search(text):
        return set()
    return {name for name in raised if not any(base in text for base in package.line_of(name))}


def checked(trees: Mapping[Path, ast.Module]) -> tuple[int, list[str]]:
    """How many functions raise, and those that do not name all of it."""
    package = Package(trees)
    count, silent = 0, list[str]()
    for file, tree in trees.items():
        module = Module(tree, package)
        for found in documented(tree):
            missing = unnamed(found, module, package)
            count += missing is not None
            if missing:
                silent.append(f"{at(file, found)} {', '.join(sorted(missing))}")
    return count, silent


def test_functions_that_raise_name_the_error() -> None:
    count, silent = checked({file: tree_of(file) for file in FILES})
    assert count > 300
    assert 1 - len(silent) / count >= LEAST, "\n".join(silent)


CLASSES = """
class PlanError(ValueError): ...
class UnsupportedModel(PlanError): ...
class _Own(Exception): ...
def made() -> PlanError: ...
def _private(): raise PlanError
class Base:
    def named(self): 'Raises PlanError.'
    def silent(self): 'Text.'
class Derived(Base):
    'Text.'
    def _private(self): raise PlanError
"""
SILENT = {
    "nothing is named": "def f():\n 'Text.'\n raise PlanError('x')",
    "another is named": "def f():\n 'Raises TypeError.'\n raise PlanError('x')",
    "in a private function": "def f():\n 'Text.'\n _private()",
    "in a private method": "class A:\n def _g(self): raise PlanError\n def f(self):\n  'Text.'\n  self._g()",
    "made by a function": "def f():\n 'Text.'\n raise made()",
    "in a constructor": "class A:\n 'Text.'\n def __init__(self): raise PlanError",
    "caught as another": "def f():\n 'Text.'\n try: raise PlanError\n except TypeError: pass",
    "in a handler": "def f():\n 'Text.'\n try: g()\n except TypeError: raise PlanError from None",
    "of a base that is silent": "class A(Base):\n def silent(self): raise PlanError",
}
STATED = {
    "named": "def f():\n 'Raises PlanError.'\n raise PlanError('x')",
    "by a base": "def f():\n 'Raises PlanError.'\n raise UnsupportedModel('x')",
    "caught": "def f():\n 'Text.'\n try: raise UnsupportedModel\n except PlanError: pass",
    "raised later": "def f():\n 'Text.'\n def g(): raise PlanError\n return g",
    "private": "def f():\n 'Text.'\n raise _Own",
    "of an interface": "def f():\n 'See `Transport`.'\n raise PlanError",
    "of a base": "class A(Base):\n def named(self): raise PlanError",
    "a method of another class": "class A:\n def _private(self): ...\n def f(self):\n  'Text.'\n  self._private()",
    "a command": "def f():\n 'Text.'\n with friendly_errors(): raise PlanError",
}


@pytest.mark.parametrize("case", SILENT)
def test_a_silent_function_is_found(case: str) -> None:
    assert len(checked({FILES[0]: ast.parse(CLASSES + SILENT[case])})[1]) == 1


@pytest.mark.parametrize("case", STATED)
def test_a_function_that_says_it_passes(case: str) -> None:
    assert checked({FILES[0]: ast.parse(CLASSES + STATED[case])})[1] == []
