"""Ranks on several hosts know one another by a secret, and read nothing that is not from one of them."""

import itertools
import pickle
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from patchpar.errors import AuthenticationError, LaunchError, PlanError
from patchpar.launch import default_group, torchrun
from patchpar.launch.authentication import Greeting, Greetings
from patchpar.launch.control_group import LinkControl
from patchpar.launch.message_seal import TAG_BYTES, MessageSeal
from patchpar.launch.messages import unpack
from patchpar.launch.remote_errors import RemoteError, take_down
from patchpar.launch.sealed_control import SealedControl
from patchpar.launch.shared_secret import NetworkTrust
from patchpar.launch.torchrun import TorchrunContext
from patchpar.launch.torchrun_connection import TorchrunConnection
from tests.launch.fake_gpus import FakeGpus
from tests.launch.hosts import (
    KEY,
    PATIENCE,
    SHARED,
    AtBorder,
    flipped,
    forged,
    introduce,
    own_hosts,
    three_controls,
    trap,
    two_controls,
)
from tests.launch.test_control import on_all
from tests.launch.threads_as_ranks import ranks_of_torchrun

__all__ = ["own_hosts", "three_controls", "trap", "two_controls"]  # fixtures
NOTHING, TRUSTING, BAD = NetworkTrust(), NetworkTrust(trusts_network=True), NetworkTrust(problem="mode 0644")
OTHER = NetworkTrust(secret=b"another secret, which is as long as it has to be")

pytestmark = pytest.mark.usefixtures("own_hosts")


def started(controls, *trusts):
    return on_all(controls, lambda control, rank: introduce(control, trusts[rank], rank))


def refusals(found):
    assert all(isinstance(error, (LaunchError, PlanError)) for error in found), found
    return [str(error) for error in found]


def test_ranks_with_one_secret_read_one_another_and_no_two_sessions_are_alike(three_controls):
    seals = started(three_controls, SHARED, SHARED, SHARED)
    again = started(three_controls, SHARED, SHARED, SHARED)
    for sender, reader in itertools.permutations(range(3), 2):
        purpose = f"from {sender} to {reader}"
        for data in (b"", b"first", b"x" * 100_000):
            assert seals[reader].open(purpose, sender, seals[sender].seal(purpose, data)) == data
        with pytest.raises(AuthenticationError, match=f"rank {reader} has refused .* rank {sender} should have sent"):
            again[reader].open(purpose, sender, seals[sender].seal(purpose, b"first"))


def test_a_rank_with_another_secret_is_named_and_nobody_starts(three_controls):
    first, second, third = refusals(started(three_controls, SHARED, SHARED, OTHER))
    for text in (first, second):
        assert text.startswith("rank 2 (on ")
        assert "did not prove to have the secret" in text
        assert "Copy the same file to all hosts" in text
    assert third.startswith("rank 0 (on ")
    assert " and rank 1 (on " in third


@pytest.mark.parametrize("other", [NOTHING, TRUSTING], ids=["nothing", "trust"])
def test_a_rank_without_a_secret_is_named_on_all(three_controls, other):
    for text in refusals(started(three_controls, SHARED, other, SHARED)):
        assert "has a secret_file and rank 1 (on " in text
        assert "has none: pass the same on all ranks" in text


def test_without_a_secret_nobody_starts_unless_all_trust_the_network(three_controls):
    for trusts in ((NOTHING,) * 3, (TRUSTING, TRUSTING, NOTHING)):
        for text in refusals(started(three_controls, *trusts)):
            assert "would unpickle, and so run, whatever is sent to them over the network" in text
            assert "secret_file=" in text
            assert "trusted_network=True" in text
    assert started(three_controls, TRUSTING, TRUSTING, TRUSTING) == [None] * 3


def test_a_rank_whose_secret_file_is_bad_is_named_on_all(three_controls):
    found = started(three_controls, SHARED, BAD, SHARED)
    first, second, third = refusals(found)
    assert first == third
    assert "rank 1 (on " in first
    assert "cannot use its secret: mode 0644" in first
    assert isinstance(found[1], PlanError)
    assert second == "mode 0644"


@pytest.mark.parametrize("greeting", [b"", b"a host", b"[]", b'{"host": 1}', b"\xff"], ids=repr)
def test_another_greeting_is_of_another_version(greeting):
    with pytest.raises(LaunchError, match="rank 3 does not greet as patchpar does: use the same version"):
        Greeting.read(3, greeting)
    own = Greeting.of(SHARED)
    assert Greeting.read(3, own.as_bytes()) == own
    with pytest.raises(LaunchError):
        Greeting.read(3, own.as_bytes().replace(b'"has_secret": true', b'"has_secret": "yes"'))


def test_an_old_session_cannot_be_played_again(two_controls):
    """Somebody who has recorded a whole start plays rank 1, and the way back of rank 0's own words too."""
    played = []

    def recorded(rank, message):
        played.append(message)
        return message

    border = AtBorder(two_controls[0], recorded)
    seals = on_all([border, two_controls[1]], lambda control, rank: introduce(control, SHARED, rank))
    assert all(isinstance(seal, MessageSeal) for seal in seals)
    assert len(played) == 4, "two greetings and two proofs"
    old = iter(played)
    replayed = AtBorder(two_controls[0], lambda rank, message: next(old))
    first, _ = on_all([replayed, two_controls[1]], lambda control, rank: introduce(control, SHARED, rank))
    assert isinstance(first, LaunchError)
    assert "rank 1 (on " in str(first)


def test_a_proof_of_another_rank_proves_nothing(two_controls):
    """Somebody without the secret sends rank 0 what rank 0 has sent."""
    own = []

    class Mirror(AtBorder):
        def gather(self, data, patience):
            own.append(data)
            found = self._inner.gather(data, patience)
            return [data, data] if len(own) == 2 else found

    mirror = Mirror(two_controls[0], None)
    first, _ = on_all([mirror, two_controls[1]], lambda control, rank: introduce(control, SHARED, rank))
    assert isinstance(first, LaunchError)
    assert "did not prove" in str(first)


def test_ranks_that_heard_different_greetings_do_not_start(two_controls):
    """Somebody on the way changes what one rank says."""
    border = AtBorder(two_controls[0], lambda rank, message: message.replace(b'"name"', b'"name" '))
    for error in on_all([border, two_controls[1]], lambda control, rank: introduce(control, SHARED, rank)):
        assert isinstance(error, LaunchError)
        assert "did not prove" in str(error)


def test_ranks_of_one_host_need_no_secret(two_controls, monkeypatch):
    from patchpar.launch import authentication

    monkeypatch.setattr(authentication, "this_host", lambda: "one host")
    found = on_all(two_controls, lambda control, rank: Greetings(control, NOTHING, rank, PATIENCE))
    assert [greetings.are_of_one_host for greetings in found] == [True, True]
    assert found[0].digest == found[1].digest
    monkeypatch.setattr(authentication, "this_host", lambda: "")
    found = on_all(two_controls, lambda control, rank: Greetings(control, NOTHING, rank, PATIENCE))
    assert [greetings.are_of_one_host for greetings in found] == [False, False], "unknown is not the same"


@pytest.mark.parametrize("is_open", [True, False], ids=["with a bad file", "with a good one"])
def test_on_one_host_a_secret_is_not_used_but_a_bad_one_is_said(monkeypatch, tmp_path, is_open):
    file = tmp_path / "secret"
    file.touch(0o644 if is_open else 0o600)
    file.write_bytes(SHARED.secret)
    found = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])], secret_file=file)
    if is_open:
        assert all(isinstance(error, PlanError) and "mode 0644" in str(error) for error in found), found
        return
    for executor in found:
        assert isinstance(executor._control, LinkControl)
        assert executor._context.seal is None
        executor.close()


def test_gpus_of_one_host_have_a_random_key(monkeypatch):
    """What they send one another goes through NCCL, not through the sockets of the host."""
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: made.append(args))
    monkeypatch.setattr(dist, "is_initialized", lambda: len(made) >= 2)
    monkeypatch.setattr(default_group.atexit, "register", lambda function: None)
    monkeypatch.setattr(torchrun, "check_default_group", lambda device, cards: None)
    both = threading.Barrier(2)
    real = torchrun.form_group_of_host
    monkeypatch.setattr(torchrun, "form_group_of_host", lambda *args: (real(*args), both.wait(PATIENCE)))
    keys = []
    for _ in range(2):
        made.clear()
        executors = ranks_of_torchrun(monkeypatch, [FakeGpus(["A"]), FakeGpus(["B"])])
        first, second = (executor._context.seal for executor in executors)
        assert second.open("encoders", 0, first.seal("encoders", b"text")) == b"text"
        keys.append(first._key)
        for executor in executors:
            executor.close()
    assert keys[0] != keys[1]


# --- messages -------------------------------------------------------------------------------------------------------


def sealed_pair():
    return MessageSeal(KEY, 0), MessageSeal(KEY, 1)


def refused(reader, purpose, sender, message):
    with pytest.raises(AuthenticationError, match=f"a message .{purpose}. that rank {sender} should have sent"):
        reader.open(purpose, sender, message)


@pytest.mark.parametrize("at", [0, TAG_BYTES - 1, TAG_BYTES, -1])
def test_a_changed_bit_is_refused(at):
    sender, reader = sealed_pair()
    refused(reader, "results", 0, flipped(sender.seal("results", b"an image"), at))


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1, TAG_BYTES, TAG_BYTES + 3])
def test_a_cut_message_is_refused(length):
    sender, reader = sealed_pair()
    refused(reader, "results", 0, sender.seal("results", b"an image")[:length])


def test_a_repeated_or_left_out_message_is_refused():
    sender, reader = sealed_pair()
    first, second, third = (sender.seal("results", data) for data in (b"1", b"2", b"3"))
    assert reader.open("results", 0, first) == b"1"
    refused(reader, "results", 0, first)
    assert reader.open("results", 0, third) == b"3", "its place is the third, whatever came before"
    _, reader = sealed_pair()
    refused(reader, "results", 0, second)


def test_a_message_of_another_rank_or_for_something_else_is_refused():
    sender, reader = sealed_pair()
    refused(reader, "results", 2, sender.seal("results", b"1"))
    for purpose in ("errors", "prompts"):  # of another length, and of the same
        sender, reader = sealed_pair()
        refused(reader, purpose, 0, sender.seal("results", b"1"))
    sender, reader = sealed_pair()
    message = sender.seal("result", b"s1")
    refused(reader, "results", 0, message[:TAG_BYTES] + b"1")
    refused(MessageSeal(bytes(32), 1), "results", 0, sender.seal("results", b"1"))
    assert KEY.decode() not in repr(sender)


def test_all_agree_through_a_sealed_control(three_controls):
    seals = started(three_controls, SHARED, SHARED, SHARED)

    def work(control, rank):
        sealed = SealedControl(control, seals[rank])
        return [
            sealed.gather(b"%d" % rank, PATIENCE),
            sealed.broadcast(b"of rank 0" if rank == 0 else b""),
            sealed.gather(b"", PATIENCE),
        ]

    assert on_all(three_controls, work) == [[[b"0", b"1", b"2"], b"of rank 0", [b""] * 3]] * 3


def test_a_changed_message_of_a_rank_ends_it_for_all(three_controls):
    seals = started(three_controls, SHARED, SHARED, SHARED)
    controls = [AtBorder(three_controls[0], lambda rank, m: flipped(m) if rank == 2 else m), *three_controls[1:]]
    sealed = [SealedControl(control, seal) for control, seal in zip(controls, seals, strict=True)]
    first, *others = on_all(sealed, lambda control, rank: control.gather(b"fine", PATIENCE))
    assert isinstance(first, AuthenticationError)
    assert "rank 0 has refused a message (gather) that rank 2 should have sent" in str(first)
    assert others == [[b"fine"] * 3] * 2
    for error in on_all(sealed, lambda control, rank: control.gather(b"next", PATIENCE)):
        assert isinstance(error, (LaunchError, RuntimeError))
        assert "closed" in str(error) or "rank 0 has gone" in str(error), "no rank waits for one that refuses"


@pytest.mark.parametrize("is_verified", [True, False], ids=["verified", "not verified"])
def test_a_forged_answer_is_not_unpickled(two_controls, trap, is_verified):
    """Not verified, it is: so the test would see it."""
    evil = forged((pickle.dumps((True, trap)), (), b""))
    seal = MessageSeal(KEY, 1) if is_verified else None
    control = AtBorder(two_controls[1], lambda rank, message: evil if is_verified else evil[TAG_BYTES:])
    connection = TorchrunConnection(SealedControl(control, seal) if seal else control, seal=seal)
    context = TorchrunContext(1, ("cpu", "cpu"), connection)
    two_controls[0].broadcast(b"the true answer")
    if is_verified:
        with pytest.raises(AuthenticationError, match="Nothing of it was read"):
            context.ask("anything")
    else:
        context.ask("anything")
    assert trap.folder.exists() != is_verified


def test_an_exception_of_another_rank_is_read_without_unpickling(trap):
    try:
        raise ValueError("too \ud800 large")
    except ValueError as error:
        own = take_down(error)
    assert RemoteError.of_json(own.as_json()) == replace(own, exception=None)
    for message in (pickle.dumps(trap), b"", b"[]", b'["ValueError"]', b"7", b"\xff"):
        with pytest.raises(LaunchError, match="in a form that is not known here"):
            RemoteError.of_json(message)
    assert not trap.folder.exists()


def test_the_trap_works(trap):
    unpack(pickle.dumps((pickle.dumps(trap), (), b"")))
    assert trap.folder.exists()
