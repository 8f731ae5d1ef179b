"""Signals that end a command: what is open is closed, and a kernel that takes long does not hold them up."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from patchpar.cli.shutdown import ended_at_once
from patchpar.launch import shutdown
from patchpar.launch.shutdown import computation_abandoned, exit_code, signals_unwind
from tests.breadth import first_of

PRELUDE = """
import hashlib, sys, threading, time
from patchpar.cli.shutdown import ended_at_once, ended_by_signals
from patchpar.launch import shutdown
shutdown.SECONDS = 0.5  # not three, so that the test takes less
def kernel():
    "Minutes in one call that leaves the interpreter to other threads, and hears of no signal."
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
def say(word):
    print(word, flush=True)
"""


def after(source: str, *signals: signal.Signals) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script that gets these when it has said that it is ready."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in signals:
            os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "code"), first_of([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGINT, 130))
)
def test_in_the_middle_of_a_kernel(number: signal.Signals, code: int) -> None:
    source = """
    with ended_by_signals(), ended_at_once():
        threading.Timer(0.3, say, ["ready"]).start()
        kernel()
    """
    returned, _, err = after(source, number)
    assert returned == code
    assert f"ended by {number.name}, in the middle of a computation" in err


def test_it_ends_also_where_nobody_reads_its_errors_any_more() -> None:
    """As with `2>&1 | tee log`, whose tee the same ctrl-C has ended; and after a program has closed them itself."""
    source = """
    {closing}
    with ended_by_signals(), ended_at_once():
        threading.Timer(0.3, say, ["ready"]).start()
        kernel()
    """
    for closing in ("", "sys.stderr.close()"):
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(source.format(closing=closing))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                assert process.stdout.readline() == b"ready\n"
                process.stderr.close()
                os.kill(process.pid, signal.SIGINT)
                assert process.wait(timeout=20) == 130
            finally:
                process.kill()


@pytest.mark.parametrize("number", first_of([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_what_is_open_is_closed_where_the_main_thread_hears(number: signal.Signals) -> None:
    """Also when closing takes longer than a kernel may, outside of what ends at once."""
    source = """
    import typer
    try:
        with ended_by_signals():
            try:
                with ended_at_once():
                    say("ready")
                    time.sleep(600)
            finally:
                time.sleep(1.0)
                say("closed")
    except typer.Exit as end:
        sys.exit(end.exit_code)
    """
    returned, out, err = after(source, number)
    assert returned == 128 + number
    assert out == "closed\n"
    assert err == f"ended by {number.name}\n"


def test_it_leaves_signals_and_descriptors_as_they_were() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with ended_at_once():
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    now = signal.set_wakeup_fd(before)
    assert now == before


def test_a_signal_long_after_another_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may have lost the exception of the first one, which then would be the only one ever."""
    monkeypatch.setattr(shutdown, "CLEANUP_SECONDS", 0.0)
    with signals_unwind():
        for _ in range(2):
            with pytest.raises(SystemExit) as ending:
                os.kill(os.getpid(), signal.SIGTERM)
            assert ending.value.code == 143


def test_a_further_signal_does_not_interrupt_the_cleanup() -> None:
    """Which `docker stop` gives as long."""
    with signals_unwind():
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        for number in shutdown.ENDING:
            os.kill(os.getpid(), number)


def test_a_thread_other_than_the_main_one_is_left_alone() -> None:
    """Python has signals handled by the main thread only."""
    entered = list[str]()

    def enter() -> None:
        with ended_at_once():
            entered.append("inside")

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(20)
    assert entered == ["inside"]


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(), 0),
        (SystemExit("no such model"), 1),
    ],
)
@pytest.mark.parametrize("is_computing", [True, False])
def test_only_what_still_computes_is_abandoned(
    ending: BaseException, code: int, is_computing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = list[int]()
    monkeypatch.setattr(shutdown, "abandon_computation", codes.append)
    with pytest.raises(type(ending)), computation_abandoned(lambda: is_computing):
        raise ending
    assert codes == [code] * is_computing
    assert exit_code(ending) == code


@pytest.mark.parametrize(
    ("code", "number", "sentence"),
    [(143, None, "ended by SIGTERM"), (0, signal.SIGINT, "ended by SIGINT"), (1, None, "ended"), (0, None, "ended")],
)
def test_the_signal_is_named_where_there_is_one(
    code: int, number: int | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream without end is ended by ctrl-C with code 0. A library may have exited by itself, with any code."""
    ends, errors = list[int](), io.StringIO()
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(sys, "stderr", errors)
    shutdown.abandon_computation(code, number)
    assert (ends, errors.getvalue()) == ([code], f"\n{sentence}, in the middle of a computation\n")
