"""Output files at the limits of the file system: long names, a full disk, a reader that has ended."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

from patchpar.cli.bench.records import RecordFile
from patchpar.cli.console import _has_lost_its_reader, friendly_errors, stdout_kept_clean
from patchpar.cli.output_files import _umask, full_disk_named, save, written_whole
from patchpar.cli.stream.live_inputs import _standard_input
from patchpar.cli.stream.replay import _can_be_asked
from patchpar.errors import PatchparError, PlanError

MOST = 2**20  # bytes of a file
LONG = "ж" * 125 + ".png"  # 254 bytes, of 255 that a name may have
TOO_LONG = "File name too long; choose another path with --output"


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may have more than MOST bytes; what is written to the terminal is less."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def noise(side: int = 1024) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8))


def test_a_name_may_be_as_long_as_the_file_system_takes(fake: Any, run: Any, tmp_path: Path) -> None:
    result = run("generate", "a fox", "-o", tmp_path / LONG)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == [LONG]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "a fox", "-o", f"xx{LONG}"), TOO_LONG),
        (("generate", "a fox", "a pine", "-o", LONG), TOO_LONG),
        (("generate", "a fox", "a pine", "-o", "."), "it is a folder; name a file, such as image.png"),
        (("compare", "a fox", "-o", "/"), "it is a folder; name a file, such as /image.png"),
        (("generate", "a fox", "-o", "."), "it is a folder; name a file, such as image.png"),
        (("compare", "a fox", "-o", "NAME"), "cannot write NAME: the suffix '' names no image format"),
        (("generate", "a fox", "a pine", "-o", "x.v2"), "cannot write x.v2: the suffix '.v2' names no image format"),
        (("generate", "a fox", "-o", "a-file/x.png"), "cannot write a-file/x.png: a-file is a file, and no folder"),
    ],
    ids=["one byte too many", "with its number", "here", "root", "this", "stem", "numbered", "in a file"],
)
def test_a_name_that_no_file_can_have(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    result = run(*words)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output
    assert fake.opened == []


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "a fox", "-o", "x.png", "--trace", "./x.png"),
        ("upscale", "small.png", "-o", "x.png", "--trace", "link.png"),
        ("video", "a fox", "--model", "m", "-o", "x.mp4", "--trace", "x.mp4"),
        ("stream", "-o", "x.mp4", "--record", "x.mp4"),
        ("compare", "a fox", "-o", "x.png", "--trace", "x-single.png"),
    ],
    ids=lambda words: words[0],
)
def test_two_outputs_are_two_files(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """The second would take the place of the first without a word."""
    monkeypatch.chdir(tmp_path)
    noise(8).save("small.png")
    Path("link.png").symlink_to("x.png")
    result = run(*words)
    assert (result.exit_code, "two outputs would be" in result.stderr) == (2, True), result.output
    assert fake.opened == []


def test_a_full_disk_is_seen_before_the_run(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchpar.cli.output_files.TRIED_BYTES", 2 * MOST)
    with small_disk():
        result = run("generate", "a fox", "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert f"cannot write {tmp_path / 'x.png'}: File too large; choose another path with --output" in result.stderr
    assert fake.opened == []
    assert run("generate", "a fox", "-o", tmp_path / "x.png").exit_code == 0, "the control"


def test_a_full_disk_is_seen_before_a_benchmark(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchpar.cli.output_files.TRIED_BYTES", 2 * MOST)
    with small_disk():
        result = run("bench", "a fox", "-o", tmp_path / "bench")
    assert (result.exit_code, "File too large; choose another path with --output" in result.stderr) == (2, True)
    assert fake.opened == []


@pytest.mark.parametrize("suffix", [".png", ".bmp"])
def test_a_disk_that_gets_full_meanwhile(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    with small_disk(), pytest.raises(PatchparError, match=rf"cannot write {path}: File too large; free some space"):
        save(noise(), path)
    assert list(tmp_path.iterdir()) == []
    save(noise(64), path)
    with pytest.raises(FileNotFoundError), written_whole(path) as temporary:  # another error stays what it is
        temporary.with_name("none").read_bytes()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_records_and_traces_name_their_file(tmp_path: Path) -> None:
    path, record = tmp_path / "records.jsonl", type("Record", (), {"as_json": lambda _: "x" * 2 * MOST, "key": 1})()
    with small_disk(), pytest.raises(PatchparError, match=f"cannot write {path}: File too large"):
        RecordFile(path).add(record)
    with pytest.raises(PatchparError, match="cannot write trace: No space left"), full_disk_named(Path("trace")):
        raise OSError(28, os.strerror(28))


def test_a_reader_that_has_ended_is_no_error(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    read, write = os.pipe()
    assert not _has_lost_its_reader(write)
    os.close(read)
    assert _has_lost_its_reader(write)
    os.close(write)
    monkeypatch.setattr("patchpar.cli.console._has_lost_its_reader", lambda _: True)
    with pytest.raises(BrokenPipeError), friendly_errors(debug=False):  # click ends with 1, and prints nothing
        raise BrokenPipeError(32, "Broken pipe")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("patchpar.cli.console._has_lost_its_reader", lambda _: False)
    with pytest.raises(typer.Exit), friendly_errors(debug=False):
        raise BrokenPipeError(32, "Broken pipe")
    assert "Broken pipe" in capsys.readouterr().err, "of a pipe that is not stdout"


@pytest.mark.parametrize(
    ("error", "has_way_out"),
    [
        (MemoryError("no bytes are left"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 20 GiB."), True),
        (RuntimeError("no kernel image"), False),
    ],
    ids=["host", "device", "another"],
)
def test_too_little_memory_in_this_process_is_said_with_a_way_out(
    error: Exception, has_way_out: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device computes here, whose error is not of ours; one of a worker has what is free as well."""
    with pytest.raises(typer.Exit), friendly_errors(debug=False):
        raise error
    text = capsys.readouterr().err
    assert str(error) in text
    assert text.startswith("error: There is too little memory: use a smaller image") is has_way_out
    assert ("weights=hosted" in text) is has_way_out


@pytest.mark.parametrize(
    ("text", "has_way_out"),
    [
        ("mat1 and mat2 must have the same dtype, but got Half and Float", True),
        ("Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same", True),
        ("expected scalar type Half but found Float", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_parts_in_different_dtypes_are_said_with_a_way_out(
    text: str, has_way_out: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --dtype transformers loads encoders as they are stored, and diffusers all other networks in float32."""
    with pytest.raises(typer.Exit), friendly_errors(debug=False):
        raise RuntimeError(text)
    found = capsys.readouterr().err
    assert text in found
    assert ("--dtype" in found) is has_way_out


@pytest.mark.breadth
def test_output_into_head() -> None:
    """Daily above, without a process."""
    verb = f"{sys.executable} -m patchpar simulate embedded --machine 2xH100-nvlink --plan patch=2"
    done = subprocess.run(["bash", "-c", f"{verb} | true"], capture_output=True, text=True, timeout=120, check=False)
    assert "error" not in done.stderr, done.stderr


def first_descriptor(preparation: str) -> int:
    """Of a process without stdin and stderr."""
    code = f"import os, sys, patchpar.launch.descriptors as descriptors; {preparation}; sys.exit(min(os.pipe()))"
    command = f"{sys.executable} -c '{code}' <&- 2>&-"
    return subprocess.run(["bash", "-c", command], timeout=60, check=False).returncode


def test_no_socket_takes_the_place_of_a_closed_stream() -> None:
    assert first_descriptor("descriptors.open_standard_descriptors()") > 2
    assert first_descriptor("pass") == 0, "the control"


@pytest.mark.breadth
@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "2>&-"])
def test_workers_of_a_command_without_streams(tmp_path: Path, closed: str) -> None:
    command = f"{sys.executable} -m patchpar generate fox --steps 1 --devices cpu:2 -o {tmp_path / 'x.png'} {closed}"
    assert subprocess.run(["bash", "-c", command], timeout=300, check=False).returncode == 0
    assert (tmp_path / "x.png").exists()


def test_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has them where they were closed before the command."""
    monkeypatch.setattr("sys.stdin", None)
    assert not _can_be_asked()
    with pytest.raises(PlanError, match="standard input is closed: pipe audio into the command"):
        _standard_input()
    monkeypatch.setattr("sys.stdout", None)
    with stdout_kept_clean(True):
        pass


def test_no_file_is_for_all_users_while_the_mask_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is that of the process: other threads make files meanwhile."""
    masks: list[int] = []
    change = os.umask
    monkeypatch.setattr(os, "umask", lambda mask: masks.append(mask) or change(mask))
    before = _umask()
    assert masks == [0o077, before]
