"""Sources of Python, parsed once in a process for all tests that read them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_TOKENS = re.compile(
    r"""(?P<text>(?:(?<!\w)[rRbBfFuU]{1,2})?(?:\"{3}[^"\\]*(?:(?:\\.|"(?!\"{2}))[^"\\]*)*\"{3}"""
    r"""|'{3}[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'{3}|"[^"\\\n]*(?:\\.[^"\\\n]*)*"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'))"""
    r"""|(?P<comment>#[^\n]*)|(?P<name>(?<!\w)[^\W\d]\w*)""",
    re.DOTALL,
)
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes: of statements and of the expressions in them."""
    return tuple(ast.walk(tree_of(source)))


def statements_of(tree: ast.AST) -> list[ast.AST]:
    """Statements, wherever in the source, and handlers and cases, which have some: a tenth of all nodes."""
    found: list[ast.AST] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        found.append(node)
        for name in _BODIES:
            todo += getattr(node, name, None) or ()
    return found


@cache
def statements_in(source: str) -> list[ast.AST]:
    return statements_of(tree_of(source))


class Token(NamedTuple):
    """A string with its quotes (`kind` is text), a comment, or a name. `start`: in characters of the source."""

    kind: str
    text: str
    start: int


def tokens_of(source: str, *kinds: str) -> Iterator[Token]:
    """Tokens of these kinds, of source that can be parsed; some times as fast as the module tokenize."""
    for found in _TOKENS.finditer(source):
        if found.lastgroup in kinds:
            yield Token(found.lastgroup, found[0], found.start())


def line_of(source: str, token: Token) -> int:
    """The number of the line in which a token starts, from 1."""
    return source.count("\n", 0, token.start) + 1
