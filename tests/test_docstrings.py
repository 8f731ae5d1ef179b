"""Public functions that take or return tensors say which shapes these have."""

from __future__ import annotations

import ast
import re

from tests.docstrings import FILES, Documented, arguments_of, at, documented, tree_of

LEAST = 0.95

# [B, C, H, W], [B, l, N * D] and the like in the docstring; or a name such as x_BChW; or the words for no fixed shape.
IN_BRACKETS = re.compile(r"\[[\w*/+. -]+(, ?[\w*/+. -]+)*\]")
IN_NAME = re.compile(r"\b\w+_[A-Z][A-Za-z0-9]*\b")
ANY = re.compile(r"\b(any|same) shape\b")


def has_tensors(found: Documented) -> bool:
    annotations = [*(each.annotation for each in arguments_of(found.function)), found.function.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(each)) for each in annotations if each is not None)


def states_shapes(found: Documented) -> bool:
    names = " ".join(each.arg for each in arguments_of(found.function))
    text = found.text
    return bool(IN_BRACKETS.search(text) or IN_NAME.search(text) or ANY.search(text) or IN_NAME.search(names))


def test_functions_of_tensors_state_shapes() -> None:
    stated, silent = 0, list[str]()
    for file in FILES:
        for found in filter(has_tensors, documented(tree_of(file))):
            if states_shapes(found):
                stated += 1
            else:
                silent.append(at(file, found))
    assert stated / (stated + len(silent)) >= LEAST, "\n".join(silent)


def test_a_silent_function_is_found() -> None:
    silent, stated = documented(
        ast.parse(
            "def scale(x: Tensor) -> Tensor:\n    'Twice x.'\n"
            "def double(x: Tensor) -> Tensor:\n    'Twice x, [B, C, H, W].'\n"
        )
    )
    assert has_tensors(silent)
    assert not states_shapes(silent)
    assert states_shapes(stated)
