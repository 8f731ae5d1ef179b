"""Public functions that take or return tensors say which shapes these have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "patchpar"
LEAST = 0.95

# [B, C, H, W], [B, l, N * D] and the like in the docstring; or a name such as x_BChW; or the words for no fixed shape.
IN_BRACKETS = re.compile(r"\[[\w*/+. -]+(, ?[\w*/+. -]+)*\]")
IN_NAME = re.compile(r"\b\w+_[A-Z][A-Za-z0-9]*\b")
ANY = re.compile(r"\b(any|same) shape\b")


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods without an underscore, in classes without one."""
    todo: list[ast.AST] = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                todo.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                yield node


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = function.args
    several = [given.vararg] * bool(given.vararg) + [given.kwarg] * bool(given.kwarg)
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *(each for each in several if each)]


def has_tensors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    annotations = [*(each.annotation for each in arguments_of(function)), function.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(each)) for each in annotations if each is not None)


def states_shapes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    text = ast.get_docstring(function) or ""
    names = [each.arg for each in arguments_of(function)]
    return bool(IN_BRACKETS.search(text) or IN_NAME.search(text) or ANY.search(text) or any(map(IN_NAME.search, names)))


def test_functions_of_tensors_state_shapes() -> None:
    stated, silent = 0, list[str]()
    for file in sorted(PACKAGE.rglob("*.py")):
        for function in filter(has_tensors, public_functions(ast.parse(file.read_text()))):
            if states_shapes(function):
                stated += 1
            else:
                silent.append(f"{file.relative_to(PACKAGE)}:{function.lineno} {function.name}")
    assert stated / (stated + len(silent)) >= LEAST, "\n".join(silent)


def test_a_silent_function_is_found() -> None:
    silent, stated = public_functions(
        ast.parse(
            "def scale(x: Tensor) -> Tensor:\n    'Twice x.'\n"
            "def double(x: Tensor) -> Tensor:\n    'Twice x, [B, C, H, W].'\n"
        )
    )
    assert has_tensors(silent)
    assert not states_shapes(silent)
    assert states_shapes(stated)
