"""Who is to blame: the cause is told, not what followed from it."""

from dataclasses import dataclass, field

import pytest
import torch

from patchpar.errors import (
    ExchangeError,
    PatchparError,
    UnsupportedModel,
    WorkerDied,
    WorkerError,
    WorkerHung,
    WorkerOutOfMemory,
)
from patchpar.launch.hang_detection import HangLimits
from patchpar.launch.remote_errors import say_changes_left, take_down
from patchpar.launch.request_failure import error_of, is_in_step, lost_ranks
from patchpar.launch.request_loop import RequestOutcome


@dataclass
class Worker:
    """What a verdict asks of a worker."""

    rank: int
    asked: list[str] = field(default_factory=list)

    def __str__(self):
        return f"rank {self.rank}"

    def last_exchange_point(self):
        return f"last exchange point 'seam {self.rank}'"

    def last_output(self):
        return ""

    def how_it_ended(self):
        return "was killed by SIGKILL"

    def dump_stack(self):
        self.asked.append("stack")


LIMITS = HangLimits.of_call(60.0, 0.0)
RANKS = (0, 1, 2)
WORKERS = {rank: Worker(rank) for rank in RANKS}
GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9")
LATE = ExchangeError("rank 0 at up.1: rank 1 has not answered for 60 s")
ODD, HALF = ValueError("odd"), ValueError("half done")
say_changes_left(HALF)
BROKEN = getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: an illegal memory access was encountered")


def outcome(*, failed=None, returned=(), beats=(5, 5, 5), **rest):
    failures = {rank: take_down(error) for rank, error in (failed or {}).items()}
    results = dict.fromkeys(returned, None)
    return RequestOutcome(failures=failures, results=results, beats=dict(enumerate(beats)), **rest)


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        (
            outcome(died=[1], failed={0: GLOO, 2: LATE}),
            WorkerDied,
            r"^rank 1 was killed by SIGKILL; last exchange point 'seam 1'",
        ),
        (
            outcome(failed={0: GLOO, 2: LATE}),
            WorkerHung,
            r"^rank 1 answers, .*rank 2 has stopped waiting for it.*has not answ",
        ),
        (outcome(failed={0: GLOO, 1: BROKEN, 2: ODD}), WorkerDied, r"^rank 1 can use its device no more.*illegal"),
        (outcome(failed=dict.fromkeys(RANKS, BROKEN)), WorkerDied, r"^rank 0 can use its device no more"),
        (outcome(failed={0: GLOO}, beats=(9, 8, 7)), WorkerHung, r"^rank 2 answers, but makes no progress"),
        (outcome(failed={0: GLOO}, beats=(9, 8, 7), silent=[1]), WorkerHung, r"^rank 1 does not answer"),
        (
            outcome(beats=(4, 3, 9), stuck=[0, 2], waiting=[1]),
            WorkerHung,
            r"^rank 0 answers, .*neither made progress nor worked for too long \(limit 60 s\).*longer deadline=",
        ),
        (outcome(beats=(4, 3, 9), stuck=[2], waiting=[0, 1], silent=[2]), WorkerHung, r"^rank 2 does not answer"),
        (
            outcome(beats=(4, 3, 9), stuck=[0, 1, 2], waiting=[0, 1, 2]),
            WorkerHung,
            r"^rank 1 answers, .*all ranks have waited for one another for too long \(limit 60 s\)",
        ),
        (
            outcome(beats=(4, 3, 9), stuck=[0], waiting=[1, 2], working=[0]),
            WorkerHung,
            r"^rank 0 answers, .*worked for too long without reaching another exchange point \(limit 1800 s\)",
        ),
        (outcome(failed={0: LATE}, waiting=[2]), WorkerHung, r"^rank 1 answers, .*rank 0 has stopped waiting for it"),
        (outcome(failed={0: GLOO, 1: ODD}), WorkerError, r"^rank 1 raised ValueError: odd"),
        (outcome(failed={0: GLOO, 1: ODD, 2: GLOO}), WorkerError, r"^rank 1 raised ValueError: odd"),
        (outcome(failed={0: ODD, 1: KeyError("k"), 2: ODD}), WorkerError, r"^rank 0 raised ValueError: odd"),
        (outcome(failed={0: LATE, 1: LATE, 2: LATE}), ExchangeError, r"has not answered for 60 s"),
        (outcome(failed={0: ODD, 1: ODD, 2: ODD}), ValueError, r"^odd$"),
        (outcome(failed={0: ODD, 1: ODD}, returned=[2]), WorkerError, r"^rank 0 raised ValueError: odd"),
        (outcome(failed={0: ODD, 1: ODD}, returned=[2], bystanders=[2]), ValueError, r"^odd$"),
        (outcome(failed={0: ODD}, aborted=KeyError("mine"), returned=[1, 2]), KeyError, "mine"),
        (outcome(not_reading=[2]), WorkerHung, r"^rank 2 has not read its messages for 10 s"),
    ],
)
def test_the_cause_is_told(how, kind, says):
    error = error_of(how, WORKERS, LIMITS)
    assert type(error) is kind
    if isinstance(error, WorkerError):
        assert str(error).startswith(f"rank {error.rank} ")
    with pytest.raises(kind, match=says):
        raise error


def test_all_is_well():
    assert error_of(outcome(returned=[0, 1, 2]), WORKERS, LIMITS) is None


@pytest.mark.parametrize(
    ("how", "reusable"),
    [
        (outcome(returned=[0, 1, 2], beats=(1, 2, 3)), True),
        (outcome(failed={0: ODD, 1: ODD, 2: ODD}), True),
        (outcome(failed={1: ODD}, returned=[0, 2]), True),
        (outcome(failed={1: ODD}, returned=[0, 2], beats=(5, 4, 5)), False),
        (outcome(failed={0: ODD, 1: ODD}, returned=[2], bystanders=[2], beats=(5, 5, 0)), True),
        (outcome(failed={0: ODD, 1: GLOO, 2: ODD}), False),
        (outcome(failed={0: ODD, 1: HALF, 2: ODD}), False),
        (outcome(failed={1: BROKEN}, returned=[0, 2]), False),
        (outcome(failed={0: ODD}, returned=[1]), False),
        (outcome(died=[1], returned=[0, 1, 2]), False),
        (outcome(), False),
    ],
)
def test_who_can_be_used_again(how, reusable):
    assert is_in_step(how, RANKS) is reusable


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        (outcome(died=[1], unwound=[0, 2]), [1]),
        (outcome(died=[1], unwound=[0]), [1, 2]),
        (outcome(stuck=[0], unwound=[1, 2]), [0]),
        (outcome(not_reading=[2], failed={0: LATE}, returned=[1]), [2]),
        (outcome(failed={0: ODD}, unwound=[1, 2]), []),
        (outcome(failed={0: GLOO, 1: ODD, 2: ODD}), []),
        (outcome(failed={0: HALF, 1: ODD, 2: HALF}), [0, 2]),
        (outcome(failed={0: GLOO, 1: BROKEN, 2: ODD}), [1]),
    ],
)
def test_who_is_replaced(how, lost):
    assert lost_ranks(how, RANKS) == lost


@pytest.mark.parametrize(
    ("text", "is_broken"),
    [
        ("HIP error: unspecified launch failure", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA error: out of memory", False),
    ],
)
def test_a_broken_device_is_recognised_behind_other_exceptions(text, is_broken):
    def wrapped():
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise ExchangeError("the exchange failed") from error

    with pytest.raises(ExchangeError) as caught:
        wrapped()
    assert take_down(caught.value).broken_device is is_broken


def test_a_consequence_is_recognised_behind_other_exceptions():
    def wrapped():
        try:
            raise GLOO
        except RuntimeError as error:
            raise ValueError("the step failed") from error

    with pytest.raises(ValueError, match="the step failed") as caught:
        wrapped()
    found = take_down(caught.value)
    assert found.transport
    assert found.trace.startswith("Traceback (most recent call last):")
    assert "in wrapped\nValueError: the step failed\nwhich was caused by\nRuntimeError: " in found.trace
    assert not take_down(ValueError("the step failed")).transport


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a", 1), ValueError, "('a', 1)"),
        (KeyError("key"), KeyError, "'key'"),
        (FileNotFoundError(2, "No such file", "x.png"), FileNotFoundError, "[Errno 2] No such file: 'x.png'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), UnicodeDecodeError, None),
        (type("Special", (OSError,), {})("gone"), OSError, "Special: gone"),
        (type("Special", (RuntimeError,), {})("gone"), None, None),
        (type("Special", (Exception,), {})("gone"), None, None),
        (type("Narrower", (UnsupportedModel,), {})("use stage=1"), UnsupportedModel, "use stage=1"),
        (type("Own", (PatchparError,), {})("gone"), None, None),
        (SystemExit(3), None, None),
        (ValueError(lambda: 0), None, None),
    ],
    ids=lambda value: str(value).split(" at ")[0][:30],
)
def test_what_survives_of_an_exception(error, kind, text):
    failure = take_down(error)
    assert type(failure.exception) is (kind or type(None))
    assert text is None or str(failure.exception) == text
    assert failure.headline().endswith(str(error))


@pytest.mark.parametrize(
    ("failed", "cause"),
    [
        ({1: torch.OutOfMemoryError("20 GiB"), 0: LATE}, "torch.OutOfMemoryError"),
        (dict.fromkeys(RANKS, MemoryError("no room")), "MemoryError"),
        ({2: RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")}, "RuntimeError"),
    ],
)
def test_too_little_memory_is_said_so_whether_one_rank_or_all_lack_it(failed, cause):
    error = error_of(outcome(failed=failed), WORKERS, LIMITS)
    assert isinstance(error, WorkerOutOfMemory)
    assert error.cause == cause
