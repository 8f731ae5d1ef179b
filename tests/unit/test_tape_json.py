"""A recorded tape comes back from its text, and nothing else does."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest

from patchpar.plan.replay.tape import Boundary, Kernel, Operator, Send, Tape, Wait
from patchpar.plan.replay.tape_json import from_text, to_text

MATMUL = Operator("addmm", "float16", 2 * 8 * 16 * 32, 1024, (8, 16, 32))
BLOCK: Tape = (Boundary("blocks.0"), MATMUL, Operator("gelu", "float16", 0, 512), MATMUL)
TAPE: Tape = (
    Boundary("step 0", is_step=True),
    *BLOCK,
    Send(0, (1, 2), "kv", 64, "attn", (("kv", 60), ("moments", 4)), bulk=True),
    Wait(0, 1, 64, "attn", "kv"),
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


def with_other_values() -> list[list[list[Any]]]:
    """The entries of TAPE, each time with a text for a number or a list for a text."""
    entries = json.loads(zlib.decompress(base64.b64decode(to_text(TAPE))))[0]
    fields = [(i, j) for i, entry in enumerate(entries) for j, value in enumerate(entry) if type(value) in (int, str)]
    found = []
    for i, j in fields:
        wrong = json.loads(json.dumps(entries))
        wrong[i][j] = "os.system" if isinstance(wrong[i][j], int) else []
        found.append(wrong)
    return found


def test_fields_of_another_type_are_refused() -> None:
    for entries in with_other_values():
        written = json.dumps([entries, list(range(len(entries)))]).encode()
        with pytest.raises((ValueError, TypeError)):
            from_text(base64.b64encode(zlib.compress(written)).decode())
