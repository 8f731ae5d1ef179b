"""How ranks that torchrun has started find each other on one host, and nobody else gets in."""

import errno
import os
import secrets
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from patchpar.errors import LaunchError
from patchpar.launch import rendezvous as rendezvous
from patchpar.launch.rendezvous import CONFIG, linked, meet, name_of_job, user_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets with a name that is no file")
OTHER_USER = 54321
STRANGER = f"""
import os, socket, struct, sys
link = socket.socket(socket.AF_UNIX)
if os.getuid() == 0:
    os.setuid({OTHER_USER})
link.connect(chr(0) + sys.argv[1])
try:
    link.sendall(struct.pack("<II", 1, 2))
    print(link.recv(1))
except OSError:
    print(b"")
"""


@pytest.fixture
def name():
    return f"patchpar-test-{secrets.token_hex(8)}"


def met(name, ranks, world, deadline=20.0):
    def run(rank):
        try:
            return meet(name, rank, world, deadline)
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, ranks))


def close(found):
    for links in found:
        for link in links.values() if isinstance(links, dict) else ():
            link.close()


def test_all_meet_rank_0_as_often_as_they_like(name):
    for _ in range(3):
        found = met(name, [2, 0, 1, 3], 4)
        assert [sorted(links) for links in found] == [[0], [1, 2, 3], [0], [0]]
        for rank, links in zip([2, 1, 3], [found[0], *found[2:]], strict=True):
            links[0].sendall(b"%d" % rank)
            assert found[1][rank].recv(1) == b"%d" % rank
        close(found)


def test_who_does_not_come_is_named(name):
    first, second = met(name, [0, 2], 3, deadline=0.5)
    assert first == "rank 1 has not connected within 0.5 s: did it exit or fail?"
    assert "rank 0 has refused rank 2, or has exited" in second or "cannot connect to rank 0" in second
    assert met(name, [1], 2, deadline=0.2) == ["rank 0 has not started within 0.2 s: did it exit or fail?"]


def test_a_rank_0_that_exits_before_it_has_linked_the_others_is_noticed_by_them(name):
    def run(rank):
        if rank == 0:
            close([meet(name, 0, 3, 20.0)])
            return ""
        with pytest.raises(LaunchError) as caught:
            linked(name, rank, 3, 20.0)
        return str(caught.value)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(run, range(3)))[1:]
    assert found == [f"rank {rank} cannot connect to the others: it has closed the connection" for rank in (1, 2)]


def test_two_of_one_rank(name):
    found = met(name, [1, 1, 0], 2, deadline=2.0)
    errors = [each for each in found if isinstance(each, str)]
    assert len(errors) == 1
    assert "rank 1" in errors[0] or "rank 0 has not started" in errors[0]
    close(found)


def test_another_user_gets_nothing_and_takes_no_rank(name, monkeypatch):
    """Without the right to change the user, it is this process that takes itself for another one."""
    answered = []

    def intrude():
        command = [sys.executable, "-c", STRANGER, name]
        deadline = time.monotonic() + 20
        while not answered and time.monotonic() < deadline:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode == 0:
                answered.append(done.stdout.strip())

    if os.geteuid() != 0:
        real = user_of
        monkeypatch.setattr(rendezvous, "user_of", lambda link: real(link) if answered else OTHER_USER)
    with ThreadPoolExecutor(1) as thread:
        rank_0 = thread.submit(meet, name, 0, 2, 60.0)
        intrude()
        assert answered == ["b''"], "it is neither answered nor kept"
        links = meet(name, 1, 2, 60.0)
        close([links, rank_0.result()])


def test_another_users_socket_is_not_connected_to(name, monkeypatch):
    with socket.socket(socket.AF_UNIX) as comm:
        comm.bind("\0" + name)
        comm.listen()
        monkeypatch.setattr(rendezvous, "user_of", lambda link: OTHER_USER)
        with pytest.raises(LaunchError, match=f"a process of user {OTHER_USER} listens instead of rank 0"):
            meet(name, 1, 2, 5.0)
        with pytest.raises(LaunchError, match=r"rank 0 cannot connect to the others .*: Address already in use"):
            meet(name, 0, 2, 5.0)


def test_a_queue_of_strangers_is_waited_for_as_long_as_any_rank(name):
    """A Unix socket refuses who does not fit into its queue at once."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind("\0" + name)
        listener.listen(0)
        strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
        for each in strangers:
            each.setblocking(False)
        assert errno.EAGAIN in {each.connect_ex("\0" + name) for each in strangers}
        with pytest.raises(LaunchError, match=r"rank 0 has not started within 0\.2 s"):
            meet(name, 1, 2, 0.2)


def test_a_process_that_says_nonsense_is_sent_away(name):
    with ThreadPoolExecutor(1) as thread:
        rank_0 = thread.submit(meet, name, 0, 2, 60.0)
        for words in (b"", b"?", CONFIG.pack(7, 2), CONFIG.pack(1, 3), CONFIG.pack(0, 2)):
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(20.0)
                while link.connect_ex("\0" + name):
                    time.sleep(0.01)
                link.sendall(words)
                link.shutdown(socket.SHUT_WR)
                assert link.recv(1) == b""
        links = meet(name, 1, 2, 60.0)
        close([links, rank_0.result()])


def test_one_host_is_known_from_what_torchrun_says(monkeypatch):
    for variable, value in {"MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(variable, value)
    first = name_of_job(2)
    assert first == name_of_job(2)
    assert name_of_job(4) is None, "two of four ranks are elsewhere"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert name_of_job(2) not in (None, first)
    monkeypatch.delenv("MASTER_PORT")
    assert name_of_job(2) is None
