"""Kinds of exchanges, as statistics count them, are on the page of run statistics."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.sources import nodes_of, tree_of

PACKAGE = Path(__file__).parent.parent / "patchpar"
PAGE = Path(__file__).parent.parent / "docs" / "run-statistics.md"
EXCHANGES = ("ExchangePart", "AllGather", "all_gather", "all_to_all", "send", "receive", "send_recv", "whole_map")
UNCOUNTED = {"verify"}
OF_THE_VAE = {"result"}
"""Counted as `vae`, as all that is sent meanwhile."""


def kinds_in(source: str) -> set[str]:
    """The first text among the arguments of each exchange, written there or a constant of the module."""
    constants: dict[str, ast.expr] = {}
    for each in tree_of(source).body:
        if isinstance(each, ast.Assign):
            for target in each.targets:
                is_several = isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple)
                names = target.elts if is_several else [target]
                values = each.value.elts if is_several else [each.value]
                constants |= dict(zip(map(name_of, names), values, strict=True))
    found = set()
    for call in nodes_of(source):
        if isinstance(call, ast.Call) and name_of(call.func) in EXCHANGES:
            given = [constants.get(each.id, each) if isinstance(each, ast.Name) else each for each in call.args]
            texts = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            found |= set(texts[:1])
    return found


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_every_kind_is_explained() -> None:
    """Transports know no kinds: what they send is named by its exchange point."""
    paths = [path for folder in ("comm", "shard", "strategies") for path in (PACKAGE / folder).rglob("*.py")]
    sources = [path.read_text() for path in paths if "transport" not in path.parts and path.stem != "device_links"]
    found = set().union(*map(kinds_in, sources)) - UNCOUNTED - OF_THE_VAE
    assert len(found) >= 18
    table = PAGE.read_text().partition("Kinds of bytes:")[2].partition("\n## ")[0]
    explained = {
        kind for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for kind in re.findall(r"`(\w+)`", row)
    }
    assert found - explained == set()


def test_a_kind_is_found_where_it_is_written_and_where_it_is_a_constant() -> None:
    source = (
        'KIND, OTHER = "lattice", "other"\ncomm.exchange(where, [ExchangePart("q", [])])\ncomm.send(OTHER, "here", 1)'
    )
    assert kinds_in(source) == {"q", "other"}
