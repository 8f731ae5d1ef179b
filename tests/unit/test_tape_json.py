"""A recorded tape comes back from its text, and nothing else does."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from patchpar.plan.replay.tape import Boundary, Kernel, Leave, Operator, Receive, Send, Tape, Wait
from patchpar.plan.replay.tape_json import from_text, to_text

MATMUL = Operator("addmm", "float16", 2 * 8 * 16 * 32, 1024, (8, 16, 32))
BLOCK: Tape = (Boundary("blocks.0"), MATMUL, Operator("gelu", "float16", 0, 512), MATMUL)
TAPE: Tape = (
    Boundary("step 0", is_step=True),
    *BLOCK,
    Send(0, (1, 2), "kv", 64, "attn", (("kv", 60), ("moments", 4)), bulk=True, operation=3),
    Receive(0, 1, "attn"),
    Wait(0, 1, 64, "attn", "kv"),
    Leave(3, "attn", "kv"),
)


def test_a_tape_comes_back() -> None:
    assert from_text(to_text(TAPE)) == TAPE
    assert from_text(to_text(())) == ()


def test_what_comes_again_is_written_once() -> None:
    assert len(to_text(BLOCK * 1000)) < 10 * len(to_text(BLOCK))


def test_a_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match="no entry of a recorded tape"):
        to_text((Kernel("k", 1.0),))


@pytest.mark.parametrize("text", ["", "no base 64!", "AAAA", to_text(TAPE)[:40], to_text(TAPE)[4:]])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        from_text(text)


Entries = list[list[Any]]


def entries_of(text: str) -> Entries:
    """What different entries a text has."""
    entries: Entries = json.loads(zlib.decompress(base64.b64decode(text)))[0]
    return entries


def text_of(entries: Entries) -> str:
    """The tape that has each once."""
    return base64.b64encode(zlib.compress(json.dumps([entries, list(range(len(entries)))]).encode())).decode()


def fields_of(values: list[Any], path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where each number, text and flag is, also in a list of them."""
    for index, value in enumerate(values):
        if isinstance(value, list):
            yield from fields_of(value, (*path, index))
        else:
            yield *path, index


def with_other_values(entries: Entries) -> list[Entries]:
    """Each time a text for a number or a flag, or a list for a text."""
    found = []
    for *path, last in fields_of(entries):
        wrong = json.loads(json.dumps(entries))
        field: Any = wrong
        for index in path:
            field = field[index]
        field[last] = [] if isinstance(field[last], str) else "os.system"
        found.append(wrong)
    return found


def test_fields_of_another_type_are_refused() -> None:
    entries = entries_of(to_text(TAPE))
    assert from_text(text_of(entries)) == tuple(dict.fromkeys(TAPE)), "they are read as they are"
    wrong = with_other_values(entries)
    assert len(wrong) == 46
    for each in wrong:
        with pytest.raises((ValueError, TypeError)):
            from_text(text_of(each))
