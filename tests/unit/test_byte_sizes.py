"""Numbers of bytes are text by one function, which is no zero for small models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patchpar.plan.byte_sizes import readable_bytes

PACKAGE = Path(__file__).parents[2] / "patchpar"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (37 << 20, "37.0 MiB"),
        (1 << 27, "128.0 MiB"),
        (80 << 30, "80.0 GiB"),
    ],
)
def test_the_unit_is_the_largest_of_which_there_is_one(size: int, text: str) -> None:
    assert readable_bytes(size) == text


def test_no_module_writes_sizes_of_its_own() -> None:
    own = re.compile(r"\} (?:KiB|MiB|GiB)\b")
    files = [file.name for file in PACKAGE.rglob("*.py") if own.search(file.read_text())]
    assert files == ["byte_sizes.py"]
