"""Lines that commands write to stderr; every other line is a library's."""

from __future__ import annotations

import re

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
OURS = tuple(
    map(
        re.compile,
        (
            r"(\S )?[a-z][\w ,:=.+-]* [━╸╺ ]+ \d+/(\d+|\?) \d+:\d\d(:\d\d)?",  # a progress bar, as left at the end
            r"Starting the page\.|Ending the page and its workers\.",
            r"ended by SIG(INT|TERM)(, in the middle of a computation)?",
            r"Loading \S+ on cpu, cpu\.|Finishing what was accepted\.",
        ),
    )
)


def foreign(stderr: str) -> list[str]:
    """Lines that are not ours."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", stderr)) if line.strip()]
    return [line for line in lines if not any(each.fullmatch(line) for each in OURS)]
