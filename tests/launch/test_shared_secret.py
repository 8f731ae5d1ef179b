"""A secret file is used only where nobody else can read it, and only if it is long enough."""

import contextlib
import os

import pytest

from patchpar.errors import PlanError
from patchpar.launch.shared_secret import MAX_BYTES, NetworkTrust, check_trust, read_secret

GOOD = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(GOOD + b"\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"], ids=repr)
def test_the_end_of_the_line_is_not_part_of_it(file, end):
    file.write_bytes(GOOD + end)
    assert read_secret(file) == read_secret(str(file)) == GOOD


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o660], ids=oct)
def test_a_file_that_others_may_use_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(PlanError, match=rf"mode {mode:04o} lets others than its owner use it: `chmod 600`"):
        read_secret(file)
    file.chmod(0o400)
    assert read_secret(file) == GOOD


@pytest.mark.parametrize("content", [b"", b"\n", GOOD[:31] + b"\n", b"short"], ids=repr)
def test_a_short_secret_is_refused(file, content):
    file.write_bytes(content)
    with pytest.raises(PlanError, match=r"a secret has 32 to 4096 bytes, this one has \d+: .*openssl rand"):
        read_secret(file)


def test_a_file_of_something_else_is_refused(file):
    file.write_bytes(b"x" * (MAX_BYTES + 1000))
    with pytest.raises(PlanError, match="this one has 4097 or more"):
        read_secret(file)


def test_what_is_no_file_is_refused_and_not_waited_for(file, tmp_path, monkeypatch):
    def opened(path, flags, open_file=os.open):
        assert flags & os.O_NONBLOCK, "a pipe would be waited for"
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", opened)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, reason in ((pipe, "no regular file"), (tmp_path, "no regular file"), (tmp_path / "none", "No such file")):
        with pytest.raises(PlanError, match=rf"secret_file='{path}': .*{reason}"):
            read_secret(path)


@pytest.mark.parametrize("mode", [0o600, 0o644], ids=oct)
def test_the_file_is_closed(file, monkeypatch, mode):
    closed = []
    monkeypatch.setattr(os, "close", lambda number, close=os.close: closed.append(number) or close(number))
    file.chmod(mode)
    with contextlib.suppress(PlanError):
        read_secret(file)
    assert len(closed) == 1


def test_a_file_of_another_user_is_refused(file, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(PlanError, match=rf"belongs to user {user}, and this process is of user {user + 1}"):
        read_secret(file)


def test_a_bad_file_is_a_problem_that_all_ranks_are_told(file):
    assert NetworkTrust.of(file, trusted_network=False) == NetworkTrust(secret=GOOD)
    assert "0123" not in repr(NetworkTrust.of(file, trusted_network=False)), "no secret in a log"
    file.chmod(0o644)
    trust = NetworkTrust.of(file, trusted_network=False)
    assert trust.secret is None
    with pytest.raises(PlanError, match="mode 0644"):
        trust.check()
    NetworkTrust.of(None, trusted_network=True).check()


def test_arguments_of_a_caller(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert check_trust("~/secret", False) == (file, False)
    assert check_trust(None, True) == (None, True)
    with pytest.raises(PlanError, match="secret_file=7: use the path of a file"):
        check_trust(7, False)
    with pytest.raises(PlanError, match="trusted_network='yes': use True or False"):
        check_trust(None, "yes")
    with pytest.raises(PlanError, match="use one"):
        check_trust(file, True)
