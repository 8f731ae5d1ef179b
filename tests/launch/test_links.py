"""Workers meet over sockets that they inherit: nothing of theirs listens, so that no stranger can take a place."""

import gc
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from patchpar.launch import links
from patchpar.launch.links import PeerLink
from patchpar.launch.local import LocalExecutor
from tests.launch.conftest import PLAIN

LISTENS = {"tcp": ("st", "0A"), "tcp6": ("st", "0A"), "unix": ("Flags", "00010000")}
on_linux = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks for sockets in /proc")


def listening(pids: Iterable[int]) -> set[str]:
    """Sockets of these processes that wait for connections, over TCP or as files: where, and under which address."""
    found = set()
    for pid in pids:
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
            own = {str(link.readlink()) for link in descriptors if link.is_symlink()}
            tables = {kind: Path(f"/proc/{pid}/net/{kind}").read_text().splitlines() for kind in LISTENS}
        except FileNotFoundError:  # the process, or a descriptor of it, has gone meanwhile
            continue
        for kind, (title, row) in ((kind, (table[0], row)) for kind, table in tables.items() for row in table[1:]):
            column, listens = LISTENS[kind]
            # of tcp's two queues and two timers each has one title and two values, joined by a colon
            index = {"st": 3, "Flags": 3}[column]
            cells = row.split()
            inode = cells[9] if kind != "unix" else cells[6]
            assert column in title.split()
            if cells[index] == listens and f"socket:[{inode}]" in own:
                found.add(f"pid {pid}: {kind} {row.strip()}")
    return found


def count(kind: str, pids: Iterable[int]) -> int:
    return sum(f" {kind} " in each for each in listening(pids))


@on_linux
@pytest.mark.parametrize("kind", ["tcp", "tcp6", "unix"])
def test_the_search_sees_what_listens(kind, tmp_path):
    families = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}
    me = [int(Path("/proc/self").readlink().name)]
    with socket.socket(families[kind]) as comm:
        comm.bind(str(tmp_path / "door") if kind == "unix" else ("", 0))
        before = count(kind, me)  # this process may have others: torch listens on one to hand tensors to a process
        comm.listen()
        assert count(kind, me) == before + 1


@on_linux
def test_workers_never_listen():
    """Looked at all the while: from before they find each other to after a call."""
    found, looks, over = set(), [], threading.Event()
    with LocalExecutor(["cpu"] * 3, PLAIN) as executor:
        executor.start()
        pids = executor.pids

        def look():
            while not over.wait(0.01):
                found.update(listening(pids))
                looks.append(1)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            assert executor.call("rank") == [0, 1, 2]
            while len(looks) <= 3:
                executor.call("sleep", 0.1)
            assert executor.pids == pids
        finally:
            over.set()
            watcher.join()
    assert not found


@on_linux
def test_ranks_that_exchange_do_not_listen(pool):
    assert pool.call("add_up", 1) == [3.0, 3.0]
    assert not listening(pool.pids)


@pytest.mark.usefixtures("template")
def test_links_are_closed_where_they_were_made_and_once_is_enough():
    gc.collect()  # else what earlier tests left may be closed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    with LocalExecutor(["cpu"] * 2, PLAIN) as executor:
        executor.start()
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize("makes", ["offers", "accepts"])
def test_a_line_that_is_made_while_its_link_is_shut_ends_too(makes, monkeypatch):
    """The call has failed on another rank: nobody will say anything on that line, which would be waited for."""
    ends = socket.socketpair()
    lower, higher = PeerLink(0, 1, ends[0]), PeerLink(1, 0, ends[1])
    name, link = ("send_descriptor", lower) if makes == "offers" else ("receive_descriptor", higher)
    done = getattr(links, name)

    def shut_meanwhile(*args):
        found = done(*args)
        link.shut()
        return found

    if makes == "accepts":
        offered = lower.offer(time.monotonic() + 5)
    monkeypatch.setattr(links, name, shut_meanwhile)
    with pytest.raises(ConnectionResetError, match="ended"):
        (link.offer if makes == "offers" else link.accept)(time.monotonic() + 5)
    if makes == "accepts":
        offered.settimeout(5)
        assert offered.recv(1) == b""
    lower.close()
    higher.close()
