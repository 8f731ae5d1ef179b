"""Public functions with a quantity, such as a time or a size, say its unit, in its name or in the docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.docstrings import FILES, arguments_of, documented, tree_of
from tests.sources import statements_of

LEAST = 0.95

FRACTION = "fractions?|factor|of a window|from 0 to 1|between 0 and 1|from 1 to 0"
UNITS = {
    "time": f"seconds?|milliseconds?|ms|minutes?|hours?|{FRACTION}",
    "bytes": "bytes?|[KMGT]i?B",
    "length": f"pixels?|latents?|rows?|columns?|tokens?|elements?|characters?|channels?|units?|{FRACTION}",
    "rate": "frames per second|samples per second|bytes per second|fps|Hz|FLOP/s",
    "level": "dB|decibels?",
}
"""Kinds of quantities, with the words for their units."""
QUANTITIES = {
    "time": "timeout|deadline|grace|latency|delay|interval|duration|elapsed|patience|time|overhead",
    "bytes": "memory|budget|free",
    "length": "height|width|side|sides|margin",
    "rate": "rate|bandwidth|frequency",
    "level": "psnr",
}
"""Names, or last words of names, of numbers that are quantities of a kind."""
NAMED = "seconds|ms|bytes|pixels|rows|columns|tokens|fps|db|frames|steps"
"""Last words of names that are a unit."""


def words(names: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|_)(?:{names})$")


KINDS = {kind: words(names) for kind, names in QUANTITIES.items()}


def is_number(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(re.search(r"\b(int|float)\b", ast.unparse(annotation)))


def quantities(names: list[str]) -> Iterator[tuple[str, str]]:
    """The names that are quantities, with their kinds."""
    return ((name, kind) for name in names for kind, known in KINDS.items() if known.search(name))


def states_unit(text: str, name: str, kind: str) -> bool:
    return bool(words(NAMED).search(name) or re.search(rf"\b(?:{UNITS[kind]})\b", text, re.IGNORECASE))


def of_functions(tree: ast.Module) -> Iterator[tuple[str, str, str, str]]:
    """(place, text, name, kind) of parameters, and of functions whose result is a quantity.

    A method without a docstring has that of the class that it overrides.
    """
    for found in filter(lambda each: each.text.strip() or each.function.name == "__init__", documented(tree)):
        numbers = [each.arg for each in arguments_of(found.function) if is_number(each.annotation)]
        numbers += [found.function.name] * is_number(found.function.returns)
        owner = "" if found.owner is None else ast.get_docstring(found.owner) or ""
        for name, kind in quantities(numbers):
            yield f"{found.function.lineno} {found.name}", f"{found.text}\n{owner}", name, kind


def of_fields(tree: ast.Module) -> Iterator[tuple[str, str, str, str]]:
    """(place, text, name, kind) of fields, as of dataclasses: arguments of their constructors."""
    for node in statements_of(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            text = ast.unparse(node) if is_of_flags(node) else "\n".join(texts_in(node))
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and is_number(each.annotation)]
            names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
            for name, kind in quantities([name for name in names if not name.startswith("_")]):
                yield f"{node.lineno} {node.name}", text, name, kind


def is_of_flags(node: ast.ClassDef) -> bool:
    """Whether the text of its fields is the help of a command."""
    return node.name.endswith("Flags")


def texts_in(node: ast.ClassDef) -> Iterator[str]:
    """The docstring of a class and those behind its fields."""
    for each in node.body:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            yield each.value.value


def checked(trees: Mapping[Path, ast.Module]) -> tuple[int, list[str]]:
    """How many quantities there are, and those without a unit."""
    count, silent = 0, list[str]()
    for file, tree in trees.items():
        for position, text, name, kind in (*of_functions(tree), *of_fields(tree)):
            count += 1
            if not states_unit(text, name, kind):
                silent.append(f"{file}:{position} {name}: {kind}")
    return count, silent


def test_quantities_have_units() -> None:
    count, silent = checked({file: tree_of(file) for file in FILES})
    assert count > 100
    assert 1 - len(silent) / count >= LEAST, "\n".join(silent)


SILENT = {
    "no unit": "def f(timeout: float):\n 'Wait up to `timeout`.'",
    "another unit": "def f(timeout: float):\n 'Wait for so many bytes.'",
    "a result": "def psnr(a, b) -> float:\n 'Return the distance of two images.'",
    "a field": "class A:\n 'A link.'\n latency: float",
    "a constructor": "class A:\n 'A link.'\n def __init__(self, deadline: float): ...",
}
STATED = {
    "in the docstring": "def f(timeout: float):\n 'Wait up to `timeout` seconds.'",
    "in the name": "def f(timeout_seconds: float):\n 'Wait.'",
    "of a field": "class A:\n 'A link. `latency` in seconds.'\n latency: float",
    "of a class": "class A:\n '`deadline` in seconds.'\n def f(self, deadline: float): 'Wait.'",
    "no number": "def f(deadline: str):\n 'Text.'",
}


@pytest.mark.parametrize("case", SILENT)
def test_a_quantity_without_a_unit_is_found(case: str) -> None:
    assert len(checked({FILES[0]: ast.parse(SILENT[case])})[1]) == 1


@pytest.mark.parametrize("case", STATED)
def test_a_quantity_with_a_unit_passes(case: str) -> None:
    assert checked({FILES[0]: ast.parse(STATED[case])})[1] == []
