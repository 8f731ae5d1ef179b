"""One rank in this process: a call is a call."""

import pytest

from patchpar.errors import LaunchError
from patchpar.launch.executor import Executor
from patchpar.launch.inline import InlineContext, InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.launch.torchrun import TorchrunExecutor
from tests.launch.conftest import PLAIN, TOY
from tests.launch.fake_gpus import FakeGpus, pretend
from tests.launch.plain import PlainEngine, Strange


@pytest.fixture
def inline():
    with InlineExecutor("cpu", TOY, deadline=7.0) as executor:
        yield executor


def test_a_call_runs_here(inline):
    assert (inline.kind, inline.devices, inline.world_size) == ("inline", ("cpu",), 1)
    unique = object()
    [(args, kwargs)] = inline.call("echo", unique, key=unique)
    assert args[0] is kwargs["key"] is unique
    assert inline.call("facts")[0]["deadline"] == 7.0


def test_exceptions_come_unchanged(inline):
    with pytest.raises(Strange) as caught:
        inline.call("fail", "Strange", "as it was")
    assert caught.value.__cause__ is None
    assert inline.call("rank") == [0]


def test_a_look_at_messages_ends_though_its_time_is_over_at_once():
    """A SimpleQueue waited for ever once in some thousand first looks, which stopped streams."""
    for _ in range(30_000):
        assert InlineContext("cpu").receive(1e-9) is None


def test_events_and_questions(inline):
    heard = []
    inline.call("count", 3, on_event=lambda rank, event: heard.append((rank, event["index"])))
    assert heard == [(0, 0), (0, 1), (0, 2)]
    assert inline.call("converse", 2, on_ask=lambda question: question["value"] + 1) == [[3.0, 3.0]]
    with pytest.raises(RuntimeError, match="without on_ask"):
        inline.call("converse", 1)

    def refuse(question):
        raise Strange("the caller's own")

    with pytest.raises(Strange, match="the caller's own"):
        inline.call("converse", 1, on_ask=refuse)


def test_a_call_within_a_call_takes_neither_messages_nor_deadline_from_it():
    class Engine(PlainEngine):
        def hear(self):
            self.context.emit("now")
            return self.context.receive(0.0), self.context.deadline

    def meanwhile(rank, event):
        executor.call("rank", on_start=lambda send: send(0, "of the inner call"), expected=30.0)
        senders[0](0, "of the outer call")

    senders = []
    with InlineExecutor("cpu", PLAIN, deadline=7.0) as executor:
        executor._engine = Engine(executor._context)
        found = executor.call("hear", on_event=meanwhile, on_start=senders.append)
    assert found == [("of the outer call", 7.0)]


def test_a_call_that_cannot_begin_leaves_its_functions_to_nobody(inline):
    def refuse(send):
        raise Strange("not now")

    heard = []
    with pytest.raises(Strange):
        inline.call("count", 1, on_event=lambda *event: heard.append(event), on_start=refuse)
    inline.call("count", 1)
    assert heard == []
    assert inline._context.callbacks.on_event is None


def test_expected_time_lengthens_the_deadline(inline):
    inline.call("rank", expected=5.0)
    assert inline.call("facts", expected=5.0)[0]["deadline"] == 12.0


def test_its_gpu_is_the_current_one_during_a_call_only(monkeypatch):
    """Kernels that are told no device, such as Triton's, run on the current one."""
    gpus = pretend(monkeypatch, FakeGpus(["A", "B"]))
    with InlineExecutor("cuda:1", "tests.launch.plain:PlainEngine") as executor:
        executor.call("rank", on_start=lambda report: gpus.log.append("start"))
        with pytest.raises(Strange):
            executor.call("fail", "Strange", "as it was")
    assert gpus.log == ["start", "enter cuda:1", "leave cuda:1", "enter cuda:1", "leave cuda:1"]


def test_unknown_names_are_said(inline):
    with pytest.raises(AttributeError, match="no method 'paint'; it has add_up"):
        inline.call("paint")
    with pytest.raises(AttributeError, match="no method '_private'"):
        inline.call("_private")
    for name, says in [("toy", "package.module:Class"), ("no.such:Thing", "cannot import"), ("json:Toy", "no class")]:
        with pytest.raises(LaunchError, match=says):
            InlineExecutor("cpu", name).call("rank")


def test_closed_is_closed(inline):
    inline.call("rank")
    inline.close()
    inline.close()
    with pytest.raises(LaunchError, match="closed"):
        inline.call("rank")


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), "60", True])
def test_deadlines_are_checked(deadline):
    with pytest.raises(LaunchError, match="deadline="):
        InlineExecutor("cpu", TOY, deadline=deadline)


@pytest.mark.parametrize("kind", [InlineExecutor, LocalExecutor, TorchrunExecutor])
def test_what_all_executors_do_is_said_once(kind):
    """What is called, and how, is of their base; each says only how its ranks run a call."""
    assert issubclass(kind, Executor)
    assert not {"call", "world_size", "__enter__", "__exit__"} & set(vars(kind))
