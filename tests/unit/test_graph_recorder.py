"""How a step is captured on a GPU and its replays are watched, on a torch.cuda that only pretends."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from patchpar.comm.transport import Incoming, TensorSpec
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import ExchangeError, UnsupportedModel
from patchpar.shard.graphs import recorder
from patchpar.shard.graphs.recorder import CaptureRefused, GraphRecorder, recorder_for
from patchpar.shard.graphs.static_call import signature_of
from tests.unit.test_stream_waits import Gpu, gpu, transport

__all__ = ["gpu"]
SPEC = TensorSpec((2,), torch.float32)


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.is_there = graphs, True

    def pool(self) -> Any:
        if self.graphs.refused:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

    def replay(self) -> None:
        if not self.is_there:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.\nand more")
        self.graphs.replays += 1

    def reset(self) -> None:
        self.graphs.gpu.enqueued.append("reset")
        self.is_there = False


class Graphs:
    """In the place of torch.cuda. `refused`: what the device says when a capture ends."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.refused, self.threads = gpu, "", list[Any]()
        self.replays, self.streams = 0, list[Any]()
        self.current, self.generator = "the stream of the process", Mock()
        self.default_generators = [self.generator, self.generator]

    def graph_pool_handle(self) -> Any:
        return "a pool"

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def current_device(self) -> int:
        return 0

    def get_rng_state(self, index: int) -> Any:
        return f"state {index}"

    def set_rng_state(self, state: Any, index: int) -> None:
        self.gpu.enqueued.append(f"{state} set")

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def Stream(self, device: torch.device) -> Any:
        return f"a stream of {device}"

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        self.threads.append((threading.get_ident(), capture_error_mode))
        self.streams.append(stream)
        before, self.current = self.current, stream
        yield
        if self.refused:
            raise RuntimeError(f"{self.refused}\nand more")
        self.current = before

    def Event(self) -> Any:
        return SimpleNamespace(record=lambda: None, query=lambda: not self.gpu.stuck)


@pytest.fixture
def graphs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs(gpu)
    monkeypatch.setattr(recorder, "device_module", lambda kind: found)
    monkeypatch.setattr(recorder, "has_graphs", lambda kind: True)
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool"):
        monkeypatch.delattr(torch._C, name, raising=False)  # those of builds for GPUs take no pool that pretends
    return found


def exchanged(line: TorchTransport) -> Any:
    return line.send_recv([], [Incoming(1, (SPEC,))], "norm1").wait()


def test_messages_in_a_graph_are_neither_timed_nor_asked_for(graphs: Graphs) -> None:
    line = transport()
    line.deadline = 0.0  # its groups have been formed
    graphs.gpu.stuck = True
    recorder_for(line).capture(lambda: exchanged(line), "a step")
    assert graphs.threads == [(threading.get_ident(), "thread_local")]
    graphs.gpu.stuck = False
    line.settle("end of the call")  # nothing is awaited
    assert line.waits is not None
    assert not line.waits._awaited


@pytest.mark.parametrize("fails", ["batch_isend_irecv", "wait"])
def test_what_nccl_refuses_in_a_capture_is_no_failed_exchange(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Nothing has been sent: the ranks go on without graphs, through the same groups."""
    line = transport()

    def refuse(*_: Any) -> Any:
        raise RuntimeError("NCCL: operation not permitted when stream is capturing\nand more")

    with monkeypatch.context() as patch:
        if fails == "wait":
            graphs.gpu.__dict__["broken"] = "NCCL: operation not permitted when stream is capturing"
        else:
            patch.setattr(torch.distributed, fails, refuse)
        with pytest.raises(CaptureRefused, match="the device refuses the capture: NCCL: operation not permitted when"):
            recorder_for(line).capture(lambda: exchanged(line), "a step")
    graphs.gpu.__dict__.pop("broken", None)
    assert "abort" not in graphs.gpu.enqueued
    assert exchanged(line), "the transport can still be used"
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", refuse)
    with pytest.raises(ExchangeError, match="cannot exchange messages"):
        exchanged(line)
    assert "abort" in graphs.gpu.enqueued, "control: outside of a capture it is one"


def test_a_graph_is_not_released_while_it_is_launched(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of deadlines releases graphs, and a launch blocks while the GPU's queue is full."""
    line, launches, goes_on = transport(), threading.Event(), threading.Event()
    found = recorder_for(line).capture(lambda: exchanged(line), "a step")

    def replay(graph: Graph) -> None:
        launches.set()
        goes_on.wait(30)
        graphs.gpu.enqueued.append("launched")

    monkeypatch.setattr(Graph, "replay", replay)
    graphs.gpu.enqueued.clear()
    threads = [threading.Thread(target=found.replay), threading.Thread(target=line.poison, args=("late",))]
    threads[0].start()
    assert launches.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    goes_on.set()
    for thread in threads:
        thread.join(30)
    assert graphs.gpu.enqueued == ["abort", "abort", "launched", "reset"]


def test_each_replay_has_one_deadline(graphs: Graphs) -> None:
    line = transport()
    found = recorder_for(line).capture(lambda: "prediction", "rank 2, a step")
    assert found.output == "prediction"
    assert graphs.replays == 0
    for _ in range(2):
        found.replay()
    assert graphs.replays == 2
    line.settle("end of the call")
    graphs.gpu.stuck = True
    found.replay()
    line.deadline = 0.0
    assert line.waits is not None
    line.waits.look()  # as the thread does
    with pytest.raises(ExchangeError, match=r"rank 2, a step: the replay of its graph \(.*\) has not ended within 0 s"):
        exchanged(line)
    assert "abort" in graphs.gpu.enqueued[-3:]


def test_a_capture_uses_a_stream_of_its_own_device(graphs: Graphs) -> None:
    """torch's own is of the device that was captured on first: kernels of another device would not be in the graph."""
    of_one = GraphRecorder(torch.device("cpu", 0), None)
    for found in (of_one, of_one, GraphRecorder(torch.device("cpu", 1), None)):
        found.capture(lambda: None, "a step")
    assert graphs.streams == ["a stream of cpu:0", "a stream of cpu:0", "a stream of cpu:1"]


def test_what_a_capture_takes_of_the_memory(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "untaken_fraction", Mock(side_effect=[0.5, 0.375, 0.25, 0.5]))
    of_device = GraphRecorder(torch.device("cpu"), None)
    assert of_device.capture(lambda: None, "a step").fraction == 0.125
    assert of_device.capture(lambda: None, "a step").fraction == 0, "torch has given back what it kept"


def test_a_captured_step_casts_weights_itself(graphs: Graphs) -> None:
    """Casts that autocast keeps are freed with it, and a graph would go on reading them."""
    found, x, weight = GraphRecorder(torch.device("cpu"), None), torch.ones(2, 2), torch.nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = (x @ weight).clone()
        with torch.no_grad():
            weight.fill_(2)
        assert torch.equal(x @ weight, want), "control: autocast has kept the cast of before"
        assert torch.equal(found.capture(lambda: x @ weight, "a step").output, 2 * want)
        assert torch.is_autocast_cache_enabled()


def test_graphs_are_released_when_their_groups_end(graphs: Graphs) -> None:
    """NCCL ends no communicator while there is a graph with operations of it: torch would wait for a day."""
    line = transport()
    found = recorder_for(line).capture(lambda: "prediction", "rank 2, a step")
    found.replay()
    line.poison("a rank is gone")
    assert sorted(graphs.gpu.enqueued[-3:]) == ["abort", "abort", "reset"]
    with pytest.raises(ExchangeError, match="rank 2, a step: its graph cannot be replayed: Called CUDAGraph::replay w"):
        found.replay()
    line = transport()
    kept = recorder_for(line).capture(lambda: "prediction", "a step")
    line.close()
    assert graphs.gpu.enqueued[-1] == "reset"
    assert kept is not None


def test_what_watches_a_replay_does_not_keep_its_graph(graphs: Graphs) -> None:
    line = transport()
    found = recorder_for(line).capture(lambda: None, "a step")
    graphs.gpu.stuck = True
    found.replay()
    kept = weakref.ref(found._graph)  # type: ignore[attr-defined]
    del found
    assert line.waits is not None
    assert len(line.waits._awaited) == 1
    assert kept() is None
    graphs.gpu.stuck = False
    line.close()


def test_a_replay_behind_others_has_its_whole_time(graphs: Graphs) -> None:
    """The process is far ahead of the GPU: a deadline begins when the replay before is over."""
    line = transport()
    found = recorder_for(line).capture(lambda: None, "a step")
    found.replay()
    graphs.gpu.stuck = True
    found.replay()
    assert line.waits is not None
    since, has_begun, _, what = line.waits._awaited[0]
    line.waits._awaited[0] = (since, has_begun, lambda: True, what)
    time.sleep(0.3)
    line.deadline = 0.2
    line.waits.look()
    assert len(line.waits._awaited) == 1


def test_what_the_device_refuses_is_the_reason(graphs: Graphs) -> None:
    graphs.refused = "operation not permitted when stream is capturing"
    with pytest.raises(CaptureRefused, match="the device refuses the capture: operation not permitted when stream is"):
        recorder_for(transport()).capture(lambda: None, "a step")


@pytest.mark.parametrize("ends", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
@pytest.mark.parametrize("is_stuck", [True, False])
def test_after_a_capture_that_is_refused_torch_is_as_before(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, ends: str, is_stuck: bool
) -> None:
    """torch leaves the stream of the capture, and some versions of it go on as if it had not ended."""
    for name in (ends, "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, Mock(side_effect=RuntimeError("not recording")), raising=False)
    if is_stuck:
        stuck = RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        monkeypatch.setattr(torch, "rand", Mock(side_effect=stuck))
    graphs.refused = "operation not permitted when stream is capturing"
    with pytest.raises(CaptureRefused):
        GraphRecorder(torch.device("cpu"), None).capture(lambda: None, "a step")
    assert graphs.current == "the stream of the process"
    for name in (ends, "_cuda_releasePool"):
        getattr(torch._C, name).assert_called_once_with(0, "a pool")
    assert graphs.generator.graphsafe_set_state.called == is_stuck
    assert graphs.gpu.enqueued == ["state 0 set"]

    graphs.refused = ""
    with pytest.raises(CaptureRefused, match="what the step says"):
        GraphRecorder(torch.device("cpu"), None).capture(Mock(side_effect=RuntimeError("what the step says")), "a step")
    assert getattr(torch._C, ends).call_count == 1, "that capture has ended"


def test_errors_of_an_exchange_stay_what_they_are(graphs: Graphs) -> None:
    line = transport()
    line.poison("a rank is gone")
    with pytest.raises(ExchangeError, match="a rank is gone"):
        recorder_for(line).capture(lambda: exchanged(line), "a step")


def test_where_there_are_no_graphs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="devices of type 'cpu' cannot capture steps"):
        recorder_for(transport())
    monkeypatch.setattr(recorder, "has_graphs", lambda kind: True)
    through_host: Any = SimpleNamespace(device=torch.device("cpu"), waits=None)
    with pytest.raises(UnsupportedModel, match="pass through memory of the host"):
        recorder_for(through_host)
    assert isinstance(recorder_for(transport()), GraphRecorder)


def test_a_step_without_messages_needs_no_nccl(graphs: Graphs) -> None:
    """Its replays wait for no other rank, so that nothing is watched."""
    transport = SharedMemoryTransport(0, {}, torch.device("cpu"), 60.0)
    with pytest.raises(UnsupportedModel, match="graphs need NCCL"):
        recorder_for(transport)
    found = recorder_for(transport, with_messages=False).capture(lambda: "prediction", "a step")
    found.replay()
    assert (found.output, graphs.replays) == ("prediction", 1)


def test_a_graph_is_not_replayed_with_gradients_or_out_of_inference() -> None:
    """Its arguments were made in one mode, and must not be written to in another."""
    call, found = ((torch.zeros(2),), {}), list[Any]()
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            found.append(signature_of(call))
    assert found[0] != found[1] != found[2] != found[0]
