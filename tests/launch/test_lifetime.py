"""However a program ends, its workers end: each case is a script of its own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from patchpar.errors import WorkerDied
from patchpar.launch.local import LocalExecutor
from tests.launch.conftest import PLAIN, TOY, all_gone, is_running


@pytest.fixture
def executor():
    with LocalExecutor(["cpu"], PLAIN) as executor:
        yield executor


ROOT = Path(__file__).parents[2]
START = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from patchpar.launch.local import LocalExecutor

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

pool = LocalExecutor(["cpu"], {PLAIN!r})
"""


class Script:
    """A running script, in a session of its own as if it had a terminal of its own."""

    def __init__(self, source: str, path: Path | None = None) -> None:
        source = START + textwrap.dedent(source)
        command = [sys.executable, "-"] if path is None else [sys.executable, str(path)]
        if path is not None:
            path.write_text(source)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        if path is None:
            self.process.stdin.write(source.encode())
        self.process.stdin.close()

    def hears(self) -> list[str]:
        """The next line that the script tells."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().split()

    def pids(self) -> list[int]:
        words = self.hears()
        assert words[:1] == ["pids"], (words, self.error())
        return [int(word) for word in words[1:]]

    def error(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def ends(self, within: float = 60.0) -> int:
        return self.process.wait(within)


WAY = ["from a file", "from stdin"]


@pytest.mark.parametrize("way", WAY)
def test_a_script_without_a_main_guard(tmp_path, way):
    script = Script(
        """
        tell(*pool.call("rank"))
        tell("pids", *pool.pids)
        """,
        tmp_path / "script.py" if way == "from a file" else None,
    )
    assert script.hears() == ["0"]
    pids = script.pids()
    assert script.ends() == 0
    assert script.error() == ""
    assert all_gone(pids)


def test_started_in_a_thread_that_has_ended():
    script = Script(
        """
        thread = threading.Thread(target=pool.start)
        thread.start()
        thread.join()
        time.sleep(0.5)
        tell(*pool.call("rank"))
        tell("pids", *pool.pids)
        """
    )
    assert script.hears() == ["0"]
    assert all_gone(script.pids())
    assert script.ends() == 0


def test_a_script_that_fails():
    script = Script(
        """
        pool.call("rank")
        tell("pids", *pool.pids)
        raise ValueError("in the script")
        """
    )
    pids = script.pids()
    assert script.ends() == 1
    assert all_gone(pids)
    assert script.error().strip().endswith("ValueError: in the script")


def test_a_script_that_ends_before_its_workers_have_started():
    script = Script('pool.start(); tell("pids", *pool.pids)')
    assert all_gone(script.pids())
    assert script.ends() == 0


@pytest.mark.parametrize("times", [1, 2], ids=["ctrl-C", "ctrl-C twice"])
def test_ctrl_c(times):
    script = Script(
        """
        pool.call("rank")
        tell("pids", *pool.pids)
        pool.call("sleep", 120)
        """
    )
    pids = script.pids()
    time.sleep(0.3)
    start = time.monotonic()
    for _ in range(times):
        os.killpg(script.process.pid, signal.SIGINT)  # as a terminal does: to all of the script's group
        time.sleep(0.02)
    script.ends()
    assert time.monotonic() - start < 60.0  # long before the workers wake
    assert all_gone(pids)
    assert "KeyboardInterrupt" in script.error()


def test_ctrl_c_is_survived_by_a_script_that_catches_it():
    script = Script(
        """
        pool.call("load", "the model", replay=True)
        try:
            tell("pids", *pool.pids)
            pool.call("sleep", 30)
        except KeyboardInterrupt:
            tell(*pool.call("what_is_loaded"))
        tell("pids", *pool.pids)
        """
    )
    before = script.pids()
    time.sleep(0.3)
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.hears() == ["['the", "model']"]
    after = script.pids()
    assert set(before).isdisjoint(after)
    assert all_gone(before + after)
    assert script.ends() == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda end: end.name)
def test_killing_the_script(end):
    script = Script(
        """
        pool.call("rank")
        tell("pids", *pool.pids)
        pool.call("sleep", 30)
        """
    )
    pids = script.pids()
    time.sleep(0.2)
    script.process.send_signal(end)
    assert all_gone(pids)
    assert script.ends() == -end


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's help, which only Linux gives")
def test_killing_the_script_of_workers_that_cannot_notice():
    """One worker is stopped, one holds its interpreter: no thread of theirs can see that their script is gone."""
    script = Script(
        """
        others = [LocalExecutor(["cpu"], "tests.launch.plain:PlainEngine") for _ in range(2)]
        for other in others:
            other.call("rank")
        tell("pids", *others[0].pids, *others[1].pids)
        threading.Thread(target=others[0].call, args=("hold_interpreter", 0, 30)).start()
        time.sleep(0.3)
        os.kill(others[1].pids[0], signal.SIGSTOP)
        tell("ready")
        time.sleep(30)
        """
    )
    pids = script.pids()
    assert script.hears() == ["ready"]
    script.process.kill()
    assert all_gone(pids)
    script.ends()


def test_killing_the_script_in_the_middle_of_a_collective():
    script = Script(
        f"""
        pool = LocalExecutor(["cpu", "cpu"], {TOY!r})
        pool.call("rank")
        tell("pids", *pool.pids)
        pool.call("wait_for_rank_0", 30)
        """
    )
    pids = script.pids()
    time.sleep(0.3)
    script.process.kill()
    assert all_gone(pids)
    script.ends()


def test_what_workers_have_started_ends_with_them(executor):
    """However they end: asked to, dying by themselves, or with the script."""
    [child] = executor.call("start_child")
    with pytest.raises(WorkerDied):
        executor.call("crash", 0, "SIGKILL")
    assert all_gone([child])
    [child] = executor.call("start_child")
    executor.close()
    assert all_gone([child])


def test_killing_the_script_ends_what_its_workers_have_started():
    script = Script(
        """
        tell("pids", *pool.call("start_child"), *pool.pids)
        time.sleep(30)
        """
    )
    pids = script.pids()
    script.process.kill()
    assert all_gone(pids)
    script.ends()


def test_a_forked_child_leaves_the_workers_alone():
    script = Script(
        """
        pool.call("rank")
        tell("pids", *pool.pids)
        child = os.fork()
        if child == 0:
            pool.close()
            sys.exit(0)
        os.waitpid(child, 0)
        tell(*pool.call("rank"))
        tell("pids", *pool.pids)
        """
    )
    pids = script.pids()
    assert script.hears() == ["0"], script.error()
    assert script.pids() == pids
    assert script.ends() == 0
    assert all_gone(pids)


def test_dropping_the_executor_ends_its_workers():
    script = Script(
        """
        pool.call("rank")
        tell("pids", *pool.pids)
        del pool
        time.sleep(30)
        """
    )
    assert all_gone(script.pids())
    script.process.kill()
    script.ends()


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.breadth, id="idle"), True])
def test_killing_a_script_that_has_forked(busy):
    """A child that lives on has copies of everything that the script had."""
    script = Script(
        f"""
        pool = LocalExecutor(["cpu", "cpu"], {TOY!r})
        pool.call("rank")
        tell("pids", *pool.pids)
        if {busy}:
            threading.Thread(target=pool.call, args=("sleep", 60), daemon=True).start()
            time.sleep(0.3)
        child = os.fork()
        tell("pids", os.getpid()) if child == 0 else None
        time.sleep(60)
        """
    )
    pids, (child,) = script.pids(), script.pids()
    try:
        script.process.kill()
        assert all_gone(pids)
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)
        script.ends()


def test_a_child_forked_while_workers_are_started_holds_none_of_them():
    script = Script(
        """
        others = [LocalExecutor(["cpu"], "tests.launch.plain:PlainEngine") for _ in range(6)]
        starter = threading.Thread(target=lambda: [other.start() for other in others])
        starter.start()
        children = []
        while starter.is_alive():
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(60)
                os._exit(0)
        tell("pids", *children)
        tell("pids", *(pid for other in others for pid in (other.call("rank"), other.pids)[1]))
        time.sleep(60)
        """
    )
    children, pids = script.pids(), script.pids()
    try:
        script.process.kill()
        assert all_gone(pids)
        assert any(map(is_running, children))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        script.ends()


def test_a_child_forked_during_a_call_is_told_that_the_workers_are_not_its_own():
    script = Script(
        """
        caller = threading.Thread(target=pool.call, args=("sleep", 2))
        caller.start()
        time.sleep(0.5)
        child = os.fork()
        if child == 0:
            for attempt in (pool.start, lambda: pool.call("rank")):
                try:
                    attempt()
                except Exception as error:
                    tell(type(error).__name__, error)
            pool.close()
            tell("closed")
            sys.exit(0)
        os.waitpid(child, 0)
        caller.join()
        tell(*pool.call("rank"))
        tell("pids", *pool.pids)
        """
    )
    for _ in range(2):
        words = script.hears()
        assert words[0] == "LaunchError"
        assert "was forked from it and cannot use them: create a new pipeline" in " ".join(words)
    assert script.hears() == ["closed"]
    assert script.hears() == ["0"], script.error()
    assert all_gone(script.pids())
    assert script.ends() == 0
