"""A page of figures that a benchmark has made."""

from collections.abc import Iterable
from pathlib import Path


def publish(lines: Iterable[str], file: Path | None) -> None:
    """Write the lines to `file`, if there is one, and print them."""
    text = "\n".join(lines) + "\n"
    if file is not None:
        file.write_text(text)
    print(text)
