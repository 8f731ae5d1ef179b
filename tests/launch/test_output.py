"""What a worker prints is read in time that grows with its length alone, and kept in bounded memory."""

import os
import threading
from collections.abc import Callable
from io import FileIO

import pytest

from patchpar.launch.worker_output import LONGEST_LINE, FirstPrinter, WorkerOutput


def passed_on(write: Callable[[int], object], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """(what came to stderr, the tail) when a worker writes so and ends."""
    read, end = os.pipe()
    output = WorkerOutput(0, FileIO(read), FirstPrinter())
    try:
        write(end)
    finally:
        os.close(end)
    output.finish(60.0)
    return capsys.readouterr().err, output.tail()


def in_pieces(text: bytes, size: int) -> Callable[[int], None]:
    def write(fd: int) -> None:
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            while piece:
                piece = piece[os.write(fd, piece) :]

    return write


class CountedSearches:
    """Characters that all searches for line ends have gone over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from patchpar.launch import worker_output as output

        self.characters, self._lock, split = 0, threading.Lock(), output.whole_lines

        def counted(text: str) -> tuple[list[str], str]:
            with self._lock:
                self.characters += len(text)
            return split(text)

        monkeypatch.setattr(output, "whole_lines", counted)


def test_a_line_of_millions_of_characters_is_read_in_linear_time(monkeypatch, capsys):
    """Counted, not timed: what has been searched for a line end is not searched again for every piece that comes."""
    searches, number = CountedSearches(monkeypatch), 3_000_000
    message, tail = passed_on(in_pieces(b"x" * number + b"\nlast\n", 4096), capsys)
    assert searches.characters < 10 * number
    assert message.endswith("\nlast\n")
    assert tail.endswith("last")


def test_the_rest_of_a_line_that_is_too_long_is_left_out_and_said(capsys):
    number = 5 * LONGEST_LINE
    message, tail = passed_on(in_pieces(b"x" * number + b"\nshort\n", 1 << 16), capsys)
    first, second, _ = message.split("\n")
    assert first.startswith("x" * LONGEST_LINE)
    assert first.endswith(f"[a line of {number} characters, cut]")
    assert len(first) < LONGEST_LINE + 100
    assert second == "short"
    assert len(tail) < LONGEST_LINE + 200, "the tail is kept for error messages"


def test_a_long_line_without_an_end(capsys):
    message, tail = passed_on(in_pieces(b"y" * (2 * LONGEST_LINE), 1 << 16), capsys)
    assert message == "y" * LONGEST_LINE + f" [a line of {2 * LONGEST_LINE} characters, cut]\n"
    assert tail == message.strip()


@pytest.mark.breadth
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_lines_are_the_same_in_whatever_pieces_they_come(size, capsys):
    text = "one\r\n\ntwo\rthree\n\r\nfour é ü 漢\nfive"
    message, tail = passed_on(in_pieces(text.encode(), size), capsys)
    assert message == text + "\n"
    assert tail == text


def test_a_line_of_the_greatest_length_is_whole(capsys):
    text = "z" * LONGEST_LINE + "\n"
    assert passed_on(in_pieces(text.encode(), 1 << 16), capsys)[0] == text
